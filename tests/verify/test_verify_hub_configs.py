"""The verifier on what lies on the Hub: padding tokens outside the vocabulary, copies of types that repeat K/V heads, numbers
near a type's limits.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.verify import verify_checkpoint
from tests.helpers.own_files import CASES, make_source, make_source_model
from tests.helpers.tiny import make_config, make_model
from tests.helpers.verification import edit, failed, flip


@pytest.mark.parametrize("pad", [-1, 10_000])
def test_padding_tokens_outside_the_vocabulary(tmp_path: Path, pad: int) -> None:
    source = tmp_path / "source"
    make_model(make_config("llama")).save_pretrained(source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"pad_token_id": pad}))
    convert_checkpoint(source, tmp_path / "out", 3, ConversionOptions(method="mean"))
    findings = failed(verify_checkpoint(tmp_path / "out", source))
    assert findings == {} if pad < 0 else set(findings) <= {"loads"}


@pytest.mark.parametrize(
    "changes",
    [CASES["falcon, 40B"][1], CASES["falcon, 40B with 4"][1], {"new_decoder_architecture": True, "num_kv_heads": 2}],
)
def test_copies_of_a_type_that_caches_repeated_heads(tmp_path: Path, changes: dict[str, Any]) -> None:
    """transformers' Falcon keeps as many keys as it has query heads, in OUT as in SOURCE."""
    source = make_source("falcon", tmp_path / "source", **changes)
    convert_checkpoint(source, tmp_path / "out", changes["num_kv_heads"], ConversionOptions(method="mean"))
    report = verify_checkpoint(tmp_path / "out", source)
    assert failed(report) == {}
    assert "12 heads" in next(check.detail for check in report.checks if check.name == "cache heads")
    edit(tmp_path / "out", "transformer.h.1.self_attention.query_key_value.weight", flip(20))
    assert set(failed(verify_checkpoint(tmp_path / "out", source, logits=False))) == {"untouched tensors"}


# Small and large numbers
# ---------------------------------------------------------------------------------------------------------


def scaled(folder: Path, model_type: str, dtype: torch.dtype, scale: float) -> Path:
    """A checkpoint whose value projections are scaled."""
    model = make_source_model(model_type) if model_type in ("opt", "gptj") else make_model(make_config(model_type))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".v_proj." in name:
                parameter.mul_(scale)
    model.to(dtype).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("model_type", "dtype", "scale", "method"),
    [
        ("llama", torch.float16, 1e-6, "mean"),
        ("qwen2", torch.float16, 1e-6, "factor"),
        ("opt", torch.float16, 1e-6, "factor"),
        ("gptj", torch.float16, 1e-6, "first"),
        ("gptj", torch.float16, 1e-6, "factor"),
        ("llama", torch.float16, 1e4, "factor"),
        ("llama", torch.bfloat16, 1e-6, "factor"),
        ("llama", torch.float32, 1e4, "factor"),
    ],
)
def test_values_near_the_limits_of_their_type(
    tmp_path: Path, model_type: str, dtype: torch.dtype, scale: float, method: str
) -> None:
    source = scaled(tmp_path / "source", model_type, dtype, scale)
    if dtype == torch.float16 and scale < 1:
        values = [
            tensor for name, tensor in load_file(source / "model.safetensors").items() if name.endswith("v_proj.weight")
        ]
        assert (
            0 < max(float(tensor.abs().max()) for tensor in values) < torch.finfo(torch.float16).tiny
        )  # the test is about subnormal numbers
    convert_checkpoint(source, tmp_path / "out", 3, ConversionOptions(method=method))
    assert failed(verify_checkpoint(tmp_path / "out", source)) == {}


def test_a_flipped_subnormal_is_found(tmp_path: Path) -> None:
    """Where every bit is recomputed, the smallest number of float16 counts."""
    source = scaled(tmp_path / "source", "llama", torch.float16, 1e-6)
    convert_checkpoint(source, tmp_path / "out", 3, ConversionOptions(method="mean"))
    edit(tmp_path / "out", "model.layers.1.self_attn.v_proj.weight", flip(17))
    assert set(failed(verify_checkpoint(tmp_path / "out", source, logits=False))) == {"merged tensors"}


def test_subnormals_of_other_heads_are_found_in_the_loaded_model(tmp_path: Path) -> None:
    """Merged heads of the loaded OUT may be off by half a unit of float16, and no more."""
    source = scaled(tmp_path / "source", "llama", torch.float16, 3e-5)
    convert_checkpoint(source, tmp_path / "out", 3, ConversionOptions(method="mean"))
    assert failed(verify_checkpoint(tmp_path / "out", source)) == {}
    edit(tmp_path / "out", "model.layers.1.self_attn.v_proj.weight", lambda tensor: tensor.roll(16, 0))
    assert set(failed(verify_checkpoint(tmp_path / "out", source))) == {"merged tensors"}
