"""Quantised checkpoints, which a conversion dequantises first."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gqa_convert.checkpoint import quantised
from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.conversion.restating.restate import restate_checkpoint
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.errors import MissingExtraError, UnsupportedFormatError
from gqa_convert.families import dequantising
from gqa_convert.verify import verify_checkpoint
from tests.helpers.tiny import make_config, make_model
from tests.helpers.verification import failed

BLOCK = 32
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}


def fp8_blocks(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix in FP8 and its scales, one for each block, as DeepSeek and Qwen store them."""
    rows, columns = matrix.shape
    down, across = -(-rows // BLOCK), -(-columns // BLOCK)
    padded = torch.zeros(down * BLOCK, across * BLOCK)
    padded[:rows, :columns] = matrix
    blocks = padded.view(down, BLOCK, across, BLOCK)
    scale = blocks.abs().amax((1, 3)) / 448
    stored = (blocks / scale[:, None, :, None]).reshape(padded.shape)[:rows, :columns]
    return stored.to(torch.float8_e4m3fn).contiguous(), scale


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A Qwen3 in FP8 with scales per block, as Qwen/Qwen3-8B-FP8 is."""
    folder = tmp_path / "source"
    make_model(make_config("qwen3", head_dim=8)).save_pretrained(folder)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if "_proj.weight" in name:
            tensors[name], tensors[f"{name}_scale_inv"] = fp8_blocks(tensor)
        else:
            tensors[name] = tensor.bfloat16()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"quantization_config": FP8, "torch_dtype": "bfloat16", "own_key": 1})
    )
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def test_scales_per_block(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFormatError, match="gqa-convert convert"):
        open_checkpoint(source)
    plain = tmp_path / "plain"
    made = restate_checkpoint(source, plain)
    assert made.notes[0].startswith("the weights were quantised (fp8) and are written in bfloat16")
    config = json.loads((plain / "config.json").read_text())
    assert "quantization_config" not in config
    assert (config["own_key"], config["torch_dtype"]) == (1, "bfloat16")
    assert (plain / "chat_template.jinja").read_text() == "{{ messages }}"
    stored, found = load_file(source / "model.safetensors"), load_file(plain / "model.safetensors")
    assert found.keys() == {name for name in stored if not name.endswith("_scale_inv")}
    for name, tensor in found.items():
        assert tensor.dtype == torch.bfloat16
        if (scale := stored.get(f"{name}_scale_inv")) is None:
            assert torch.equal(tensor, stored[name])
            continue
        each = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: tensor.shape[0], : tensor.shape[1]]
        torch.testing.assert_close(tensor.float(), stored[name].float() * each, rtol=2.0**-7, atol=0)
    open_checkpoint(plain)
    convert_checkpoint(source, tmp_path / "out", 3, ConversionOptions(method="mean"))
    (plain / "gqa_restated.json").unlink()
    assert failed(verify_checkpoint(tmp_path / "out", plain)) == {}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "plain", "source"]


def test_mxfp4(tmp_path: Path) -> None:
    """Two numbers of four bits in a byte, and one power of two for each 32 numbers, as openai/gpt-oss-20b has them."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([values, -values])
    source, expected = tmp_path / "source", {}
    make_model(make_config("gpt_oss", intermediate_size=64)).bfloat16().save_pretrained(source)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 124, (experts, outputs, inputs // 32), dtype=torch.uint8)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
        pairs = torch.stack([values[(blocks & 15).long()], values[(blocks >> 4).long()]], -1).flatten(-2)
        scaled = pairs * torch.exp2(scales.float() - 127)[..., None]
        expected[name] = scaled.reshape(experts, outputs, inputs).transpose(1, 2)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    restate_checkpoint(source, tmp_path / "plain")
    found = load_file(tmp_path / "plain" / "model.safetensors")
    assert len(expected) == 4
    for name, tensor in expected.items():
        assert torch.equal(found[name].float(), tensor), name
    open_checkpoint(tmp_path / "plain")


@pytest.mark.parametrize("name", ["notes.txt", "generation_config.json"])
def test_links_that_lead_out_are_left_out(source: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "key").write_text('{"key": 1}')
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to(tmp_path / "key")
    made = restate_checkpoint(source, tmp_path / "plain")
    assert made.notes[-1] == f"links that lead out of the folder are not copied: {name}"
    assert not (tmp_path / "plain" / name).exists()


def test_what_cannot_be_loaded_leaves_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dequantising, "find_spec", lambda _: None)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "config_groups": {}}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(MissingExtraError, match="pip install compressed-tensors"):
        restate_checkpoint(source, tmp_path / "plain")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"text_config": {"quantization_config": FP8}}, "fp8"),
        ({"quantization_config": {"load_in_4bit": True, "load_in_8bit": False}}, "bitsandbytes"),
        ({"quantization": {"bits": 4, "group_size": 64}}, "mlx"),
        ({"quantization_config": None, "quantization": "none"}, None),
    ],
)
def test_the_method_in_a_config(config: dict[str, Any], method: str | None) -> None:
    assert quantised.quantisation_method(config) == method
