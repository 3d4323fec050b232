"""Translated checkpoints compute what their sources compute: stock classes on both sides are the oracle.

The reference with fewer K/V heads is the source's own class, each group's heads replaced by their mean. The tests of
verify hold more: half precision, names and buffers of older releases, tokenizers, and every tensor of a result.
"""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel

from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.conversion.plan import make_plan
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.conversion.translation.rows import RowTranslator
from gqa_convert.conversion.translation.tensors import translate_tensors
from gqa_convert.errors import ConfigError, NonFiniteError, OptionError, UnsupportedFormatError
from gqa_convert.families.source_sizes import read_dimensions, read_rotary
from gqa_convert.families.target_architectures import NoTargetArchitecture, TargetArchitecture
from gqa_convert.families.target_choice import engines_for, find_target_architecture
from gqa_convert.merging.methods import METHODS
from tests.helpers import elsewhere, native
from tests.helpers.checkpoints import digests, read_weights, write_llama
from tests.helpers.folding_cases import Case, pool
from tests.helpers.native import distance
from tests.helpers.own_files import SIZES, make_source, make_source_model
from tests.helpers.tiny import HEADS

WIDTH, HIDDEN = 8, 96
TRANSLATED = 5e-5
"""How far logits may lie apart where norms are folded into projections, as a share of their spread."""


def _rope(part: float, /, **scaling: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": part} | scaling}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2, 3], "long_factor": [2.0, 3, 4, 5]}
ORIGINAL = {"original_max_position_embeddings": 16}
SERIAL = {"use_parallel_residual": False}

CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "neox": ("gpt_neox", {"layer_norm_eps": 1e-3}, "phi"),
    "neox, no attention bias": ("gpt_neox", {"attention_bias": False} | _rope(0.5), "phi"),
    "neox, tied": ("gpt_neox", {"tie_word_embeddings": True, "hidden_act": "gelu_new"} | _rope(1.0), "phi"),
    "neox, linear": ("gpt_neox", _rope(0.5, rope_type="linear", factor=3.0), "phi"),
    "neox, dynamic": (
        "gpt_neox",
        _rope(0.5, rope_type="dynamic", factor=3.0) | {"max_position_embeddings": 4},
        "phi",
    ),
    "neox, yarn": ("gpt_neox", _rope(0.5, **YARN), "phi"),
    "neox, llama3": ("gpt_neox", _rope(0.5, **LLAMA3, **ORIGINAL), "phi"),
    "neox, longrope": ("gpt_neox", _rope(1.0, **LONGROPE, **ORIGINAL), "phi"),
    "serial": ("gpt_neox", SERIAL | _rope(1.0), "starcoder2"),
    "serial, tied, no bias": (
        "gpt_neox",
        SERIAL | {"tie_word_embeddings": True, "attention_bias": False} | _rope(1.0, **YARN),
        "starcoder2",
    ),
    "gptj": ("gptj", {"layer_norm_epsilon": 1e-3}, "phi"),
    "gptj, all rows, tied": ("gptj", {"rotary_dim": WIDTH, "n_inner": None, "tie_word_embeddings": True}, "phi"),
    "codegen": ("codegen", {}, "phi"),
    "codegen, relu": ("codegen", {"rotary_dim": WIDTH, "activation_function": "relu", "n_inner": None}, "phi"),
    "gpt2": ("gpt2", {}, "gpt_bigcode"),
    "gpt2, scaled": (
        "gpt2",
        {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True, "tie_word_embeddings": False},
        "gpt_bigcode",
    ),
    "gpt2, unscaled": (
        "gpt2",
        {"scale_attn_weights": False, "n_inner": None, "activation_function": "gelu"},
        "gpt_bigcode",
    ),
}
"""Source type, config values, and the type of the result."""

REGROUPED = [
    *((name, 1 if case[0] == "gpt2" else 3) for name, case in CASES.items()),
    *((name, groups) for name in ("neox", "serial", "gptj", "codegen") for groups in (HEADS, 1)),
]


def build(name: str) -> Case:
    model_type, changes, _ = CASES[name]
    return Case(model_type, make_source_model(model_type, **copy.deepcopy(changes)), HEADS)


@pytest.mark.parametrize(("name", "groups"), REGROUPED)
def test_equals_the_source(name: str, groups: int, tmp_path: Path) -> None:
    case = build(name)
    source, out = case.save(tmp_path / "source"), tmp_path / "out"
    converted = convert_checkpoint(source, out, groups, ConversionOptions(native=True, method="mean"))
    assert converted.plan.route == "translated"
    assert converted.plan.parameters_after == sum(array.size for array in read_weights(out).values())
    unmerged = case.logits()
    pool(case, groups)
    result = native.load(out)
    assert result.config.model_type == CASES[name][2]
    assert distance(case.logits(result), case.logits()) < TRANSLATED
    assert groups == HEADS or distance(unmerged, case.logits()) > 0.01
    assert elsewhere.generated(result) == elsewhere.generated(case.model)
    cache = result(input_ids=elsewhere.PADDED).past_key_values
    assert all(layer.keys.shape[-3] == groups for layer in cache.layers)
    changed = {change.name for change in converted.plan.changes if change.before != change.after}
    assert set(converted.merge_error) == changed
    assert all(0.1 < error < 1 for error in converted.merge_error.values())


def test_a_plan_lists_the_projections_that_take_the_folded_maps(tmp_path: Path) -> None:
    source = open_checkpoint(build("neox").save(tmp_path / "source"))
    plan = make_plan(source, 3, method="factor")
    listed = {change.name for change in plan.changes if change.before == change.after}
    assert plan.target_architecture is not None
    assert {name.split(".")[-2] for name in listed} == {"q_proj", "dense"}
    assert all(change.before != change.after for change in make_plan(source, 3, method="mean").changes)


def test_the_route_is_chosen(tmp_path: Path) -> None:
    neox, gpt2 = (open_checkpoint(build(name).save(tmp_path / name)) for name in ("neox", "gpt2"))
    assert make_plan(neox, 3).route == "translated"
    assert make_plan(neox, 3).config["model_type"] == "phi"
    assert make_plan(neox, 3, native=False).route == "own file"
    assert make_plan(neox, HEADS).route == "native"
    assert make_plan(neox, HEADS, native=True).config["model_type"] == "phi"
    assert make_plan(gpt2, 1).config["model_type"] == "gpt_bigcode"
    assert make_plan(gpt2, 3).route == "own file"
    with pytest.raises(
        OptionError, match="no stock class computes the same as this gpt2: gpt_bigcode, which is GPT-2 otherwise"
    ):
        make_plan(gpt2, 3, native=True)


def test_no_modelling_file_where_none_is_needed(tmp_path: Path) -> None:
    write_llama(tmp_path / "llama")
    with pytest.raises(OptionError, match="leave the option out"):
        make_plan(open_checkpoint(tmp_path / "llama"), 3, native=False)
    assert make_plan(open_checkpoint(tmp_path / "llama"), 3, native=True).route == "native"


def with_config(name: str, **fields: Any) -> dict[str, Any]:
    model_type, changes, _ = CASES[name]
    return {"model_type": model_type} | SIZES[model_type] | changes | fields


@pytest.mark.parametrize(
    ("name", "fields", "engines"),
    [
        ("neox", {}, {"transformers", "vLLM"}),
        ("serial", {}, {"transformers", "vLLM", "llama.cpp"}),
        ("serial", {"hidden_act": "relu"}, {"transformers", "vLLM"}),
        ("serial, tied, no bias", {}, {"transformers"}),
        ("gpt2", {}, {"transformers", "vLLM", "llama.cpp"}),
    ],
)
def test_engines(name: str, fields: dict[str, Any], engines: set[str]) -> None:
    config = with_config(name, **fields)
    target_architecture = find_target_architecture(config, 1)
    assert isinstance(target_architecture, TargetArchitecture)
    assert engines_for(config, target_architecture) == engines


@pytest.mark.parametrize("name", ["neox", "gptj", "codegen", "gpt2"])
def test_a_model_without_its_head(name: str, tmp_path: Path) -> None:
    case = build(name)
    case.model = case.model.base_model
    source = case.save(tmp_path / "source")
    assert not any(key.startswith(case.model.base_model_prefix) for key in load_file(source / "model.safetensors"))
    convert_checkpoint(source, tmp_path / "out", 1, ConversionOptions(native=True, method="mean"))
    result = AutoModel.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    pool(case, 1)
    with torch.no_grad():
        found, expected = (model(elsewhere.PADDED).last_hidden_state for model in (result, case.model))
    assert distance(found, expected) < TRANSLATED


def test_folding_rounds_once(tmp_path: Path) -> None:
    source = make_source("gpt_neox", tmp_path / "source", dtype=torch.bfloat16)
    convert_checkpoint(source, tmp_path / "out", 3, ConversionOptions(native=True, method="mean"))
    old, new = (
        {name: tensor.float().numpy() for name, tensor in load_file(folder / "model.safetensors").items()}
        for folder in (source, tmp_path / "out")
    )
    layer = "gpt_neox.layers.1."
    fused = old[f"{layer}attention.query_key_value.weight"].reshape(3, 4, 3, WIDTH, HIDDEN)
    gain, beta = (old[f"{layer}input_layernorm.{kind}"] for kind in ("weight", "bias"))
    mean = (((fused[:, 0] + fused[:, 1]) + fused[:, 2]) + fused[:, 3]) / np.float32(4)
    key = (mean[:, 1].reshape(-1, HIDDEN) * gain).astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(new["model.layers.1.self_attn.k_proj.weight"], key)
    bias = old[f"{layer}attention.query_key_value.bias"].reshape(3, 4, 3, WIDTH).mean(1)[:, 2].reshape(-1)
    bias = bias + mean[:, 2].reshape(-1, HIDDEN) @ beta
    np.testing.assert_allclose(new["model.layers.1.self_attn.v_proj.bias"], bias, rtol=2**-8, atol=1e-6)
    inner = old[f"{layer}mlp.dense_h_to_4h.weight"] * old[f"{layer}post_attention_layernorm.weight"]
    np.testing.assert_array_equal(
        new["model.layers.1.mlp.fc1.weight"], inner.astype(ml_dtypes.bfloat16).astype(np.float32)
    )


def test_memory_is_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No block is longer, however large the tensors; and the result does not depend on the block."""
    source = build("gptj").save(tmp_path / "source")
    convert_checkpoint(source, tmp_path / "large", 3, ConversionOptions(native=True, method="mean"))
    monkeypatch.setattr("gqa_convert.conversion.translation.rows._BLOCK_NUMBERS", 600)
    blocks, sizes = RowTranslator.blocks, []

    def seen(self: RowTranslator, tensor: Any) -> Any:
        for block in blocks(self, tensor):
            sizes.append(block.size)
            yield block

    monkeypatch.setattr(RowTranslator, "blocks", seen)
    convert_checkpoint(source, tmp_path / "small", 3, ConversionOptions(native=True, method="mean"))
    assert digests(tmp_path / "large") == digests(tmp_path / "small")
    assert len(sizes) > 100
    assert max(sizes) <= 600


@pytest.mark.parametrize(
    ("config", "groups", "reason"),
    [
        (with_config("gpt2"), 3, "either one K/V head"),
        (with_config("gpt2", add_cross_attention=True), 1, "cross-attention"),
        (with_config("neox", use_parallel_residual=False), 3, "2 rotary dimensions of 8"),
        (with_config("neox", rope_scaling={"type": "ntk", "factor": 2.0}), 3, "'ntk'"),
        (with_config("neox", rotary_pct=0.4), 3, "no pairs"),
        (with_config("neox", rotary_pct=1.5), 3, "makes no sense"),
        (with_config("neox", rope_parameters={"full": {"rope_theta": 1.0}}), 3, "differ between layers"),
        (with_config("neox", auto_map={"AutoModel": "x.Y"}), 3, "contains modelling code"),
        (with_config("neox", architectures=["GPTNeoXForTokenClassification"]), 3, "GPTNeoXForTokenClassification"),
        (with_config("neox", pad_token_id=64), 3, "padding token"),
        (with_config("gptj", rotary_dim=None), 3, "rotary_dim = None"),
        (with_config("gptj", rotary_dim=18), 3, "rotary_dim = 18"),
        ({"model_type": "bloom"}, 3, "bloom"),
    ],
)
def test_no_home(config: dict[str, Any], groups: int, reason: str) -> None:
    found = find_target_architecture(config, groups)
    assert isinstance(found, NoTargetArchitecture)
    assert reason in found.reason


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (with_config("neox", num_attention_heads=11), "11 heads, which do not divide"),
        (with_config("neox", hidden_size="96"), "hidden_size = '96'"),
        (with_config("codegen", n_head=6), "multiple of 4"),
    ],
)
def test_impossible_configs(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_target_architecture(config, 3)


def test_rotary_factor_survives_rounding() -> None:
    """Clients compute int(width * factor): 29 rows of 100 must not become 28."""
    for width in range(2, 260, 2):
        for rotated in range(2, width + 1, 2):
            config = {"model_type": "gptj", "n_embd": width, "n_head": 1, "n_layer": 1, "rotary_dim": rotated}
            rotary = read_rotary(config, read_dimensions(config))
            assert not isinstance(rotary, NoTargetArchitecture)
            assert int(width * rotary.factor) == rotated
            assert rotary.factor <= 1


KEY = "gpt_neox.layers.1.attention.query_key_value.weight"
GAIN = "gpt_neox.layers.1.input_layernorm.weight"
NAN = torch.ones(288, HIDDEN).index_fill(0, torch.tensor([WIDTH]), torch.nan)
LARGE = {GAIN: torch.full((HIDDEN,), 6e4).half(), KEY: torch.full((288, HIDDEN), 2.0).half()}


@pytest.mark.parametrize(
    ("changed", "missing", "error", "message"),
    [
        ({"gpt_neox.layers.3.attention.dense.weight": NAN}, "", ConfigError, "does not belong to a gpt_neox"),
        ({}, KEY.replace("weight", "bias"), ConfigError, "is missing"),
        ({}, "embed_out.weight", ConfigError, "embed_out.weight"),
        ({}, "gpt_neox.embed_in.weight", ConfigError, "gpt_neox.embed_in.weight"),
        ({KEY: NAN}, "", NonFiniteError, "holds NaN or Inf"),
        (LARGE, "", NonFiniteError, "too large for F16"),
    ],
    ids=["layer", "bias", "head", "embedding", "nan", "large"],
)
def test_damaged_sources(
    changed: dict[str, Tensor], missing: str, error: type[Exception], message: str, tmp_path: Path
) -> None:
    source = build("neox").save(tmp_path / "source")
    tensors = load_file(source / "model.safetensors") | changed
    tensors.pop(missing, None)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(error, match=message):
        convert_checkpoint(source, tmp_path / "out", 3, ConversionOptions(native=True, method="mean"))
    assert not (tmp_path / "out").exists()


def test_tensors_that_the_translation_cannot_read(tmp_path: Path) -> None:
    """Checked once more where they are translated, whatever the plan has looked at."""
    checkpoint = open_checkpoint(build("neox").save(tmp_path / "source"))
    tensors = {name: entry for _, name, entry in checkpoint.tensors()}
    target = find_target_architecture(checkpoint.config, 3)
    assert isinstance(target, TargetArchitecture)
    for changed, error, message in (
        ({KEY: replace(tensors[KEY], shape=(287, HIDDEN))}, ConfigError, "has shape"),
        ({KEY: replace(tensors[KEY], dtype="I8")}, UnsupportedFormatError, "has type I8"),
        ({}, ConfigError, "is missing: the checkpoint is incomplete"),
    ):
        others = {name: entry for name, entry in tensors.items() if name != KEY}
        with pytest.raises(error, match=message):
            translate_tensors(others | changed, checkpoint.config, target, 3, METHODS["mean"])
