"""The verifier on results of sources that were rewritten as a stock type: good ones pass, planted damage is found."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.conversion.rewriting import arrays
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.errors import ConfigError
from gqa_convert.verify import models, verify_checkpoint
from tests.helpers.own_files import make_source
from tests.helpers.verification import (
    Conversions,
    Damage,
    change,
    claim,
    claims,
    config,
    details,
    edit,
    edit_json,
    failed,
    remove,
    save_byte_pairs,
    tensor_of,
    without,
)
from tests.helpers.verify_sources import TRANSLATED, save_translated


@pytest.fixture(scope="session")
def conversions(tmp_path_factory: pytest.TempPathFactory) -> Conversions:
    return Conversions(tmp_path_factory.mktemp("verify-translated"), save_translated, native=True)


def made(conversions: Conversions, name: str) -> tuple[Path, Path]:
    """(OUT, SOURCE) of a conversion to the usual number of groups."""
    return conversions(name, 1 if TRANSLATED[name][0] == "gpt2" else 3)


@pytest.mark.parametrize(
    ("name", "groups", "method"),
    [
        ("neox", 3, "mean"),
        ("neox", 12, "mean"),
        ("neox", 1, "first"),
        ("neox, half", 3, "mean"),
        ("neox, half", 12, "mean"),
        ("neox, tied", 3, "mean"),
        ("serial", 3, "mean"),
        ("serial", 12, "mean"),
        ("serial, half", 3, "mean"),
        ("gptj", 3, "mean"),
        ("gptj", 12, "mean"),
        ("gptj, half", 4, "first"),
        ("codegen", 3, "mean"),
        ("codegen", 12, "mean"),
        ("codegen, half", 4, "mean"),
        ("gpt2", 1, "mean"),
        ("gpt2, half", 1, "mean"),
    ],
)
def test_good_conversions_pass(conversions: Conversions, name: str, groups: int, method: str) -> None:
    out, source = conversions(name, groups, method)
    report = verify_checkpoint(out, source)
    assert failed(report) == {}
    found = details(report)
    assert f"{groups} heads in each" in found["cache heads"]
    assert (" 0 parameters of SOURCE replaced" in found["logits"]) == (groups == 12)
    assert found["rewritten source"].endswith(f"against SOURCE, a {TRANSLATED[name][0]}")


# Damage
# ---------------------------------------------------------------------------------------------------------------------------


def put(out: Path, name: str, value: torch.Tensor) -> None:
    edit(out, name, lambda old: value.to(old.dtype).reshape(old.shape).contiguous())


def filled(name: str, value: float) -> Damage:
    return change(name, lambda tensor: torch.full_like(tensor, value))


def nudge(name: str, row: int, by: float) -> Damage:
    """Change one number by a share of it."""

    def nudged(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[row] *= 1 + by
        return tensor

    return change(name, nudged)


PHI, STAR, BIG = "model.layers.1.", "model.layers.0.", "transformer.h.1."
NEOX, GPTJ = "gpt_neox.layers.1.", "transformer.h.1."


def without_gain(projection: str, norm: str) -> Damage:
    def damage(out: Path, source: Path) -> None:
        gain = tensor_of(source, f"{NEOX}{norm}.weight").double()
        put(out, f"{PHI}{projection}.weight", tensor_of(out, f"{PHI}{projection}.weight").double() / gain)

    return damage


def own_bias_alone(out: Path, source: Path) -> None:
    put(out, f"{PHI}mlp.fc1.bias", tensor_of(source, f"{NEOX}mlp.dense_h_to_4h.bias"))


def norms_exchanged(out: Path, source: Path) -> None:
    """The MLP's weight with the gain of the attention's norm."""
    gain = tensor_of(source, f"{NEOX}input_layernorm.weight").double()
    put(out, f"{PHI}mlp.fc1.weight", tensor_of(source, f"{NEOX}mlp.dense_h_to_4h.weight").double() * gain)


def unturned_query(out: Path, source: Path) -> None:
    put(out, f"{PHI}self_attn.q_proj.weight", tensor_of(source, f"{GPTJ}attn.q_proj.weight"))


def unturned_key(out: Path, source: Path) -> None:
    heads = tensor_of(source, f"{GPTJ}attn.k_proj.weight").double().view(3, 4, 8, 96)
    put(out, f"{PHI}self_attn.k_proj.weight", heads.mean(1))


def exchange(first: str, second: str) -> Damage:
    def damage(out: Path, _: Path) -> None:
        one, other = tensor_of(out, first), tensor_of(out, second)
        put(out, first, other)
        put(out, second, one)

    return damage


def wrong_neighbours(out: Path, source: Path) -> None:
    """Heads 0, 3, 6, 9 share a group, where 0, 1, 2, 3 should."""
    heads = tensor_of(source, "gpt_neox.layers.0.attention.query_key_value.weight").double().view(12, 3, 8, 96)[:, 2]
    put(out, f"{STAR}self_attn.v_proj.weight", heads.view(4, 3, 8, 96).mean(0))


def thirds_for_heads(out: Path, source: Path) -> None:
    """NeoX's rows cut as if all queries came first."""
    put(
        out,
        f"{STAR}self_attn.q_proj.weight",
        tensor_of(source, "gpt_neox.layers.0.attention.query_key_value.weight")[:96],
    )


def thirds_for_quarters(out: Path, source: Path) -> None:
    """CodeGen's rows cut as if all queries came first."""
    rows = tensor_of(source, f"{GPTJ}attn.qkv_proj.weight")[96:192].double().view(3, 4, 8, 96)
    put(out, f"{PHI}self_attn.v_proj.weight", rows.mean(1))


def not_transposed(out: Path, source: Path) -> None:
    put(out, f"{BIG}attn.c_proj.weight", tensor_of(source, f"{BIG}attn.c_proj.weight"))


def add(name: str) -> Damage:
    def damage(out: Path, _: Path) -> None:
        file = sorted(out.glob("*.safetensors"))[0]
        save_file(load_file(file) | {name: torch.ones(2)}, file, metadata={"format": "pt"})

    return damage


def rotary(key: str, value: Any, *, both: bool = True) -> Damage:
    def damage(out: Path, _: Path) -> None:
        nested = json.loads((out / "config.json").read_text())["rope_parameters"] | {key: value}
        edit_json(out / "config.json", rope_parameters=nested, **({key: value} if both else {}))

    return damage


def claim_source(out: Path, **changes: Any) -> None:
    source = json.loads((out / "gqa_conversion.json").read_text())["source"]
    claim(out, source=source | changes)


MERGED, REWRITTEN, NAMES = {"merged tensors"}, {"untouched tensors"}, {"tensor names"}
CONFIG, CLAIMS, CARRIED = {"config"}, {"provenance"}, {"carried files"}
BYTES = {"before": 4, "after": 1}

DAMAGE: dict[str, tuple[str, Damage, set[str]]] = {
    "gain not in the queries": ("neox", without_gain("self_attn.q_proj", "input_layernorm"), REWRITTEN),
    "gain not in the keys": ("neox", without_gain("self_attn.k_proj", "input_layernorm"), MERGED),
    "gain not in the MLP": ("neox, half", without_gain("mlp.fc1", "post_attention_layernorm"), REWRITTEN),
    "the other norm's gain": ("neox", norms_exchanged, REWRITTEN),
    "norm's bias not folded": ("neox", own_bias_alone, REWRITTEN),
    "folded bias off": ("neox", nudge(f"{PHI}mlp.fc1.bias", 5, 3e-7), REWRITTEN),
    "folded bias of the values off": ("neox", nudge(f"{PHI}self_attn.v_proj.bias", 5, 3e-7), MERGED),
    "folded bias off in half precision": ("neox, half", nudge(f"{PHI}mlp.fc1.bias", 5, 0.016), REWRITTEN),
    "folded bias not finite": ("neox", nudge(f"{PHI}mlp.fc1.bias", 5, float("nan")), REWRITTEN),
    "gain of the neutral norm": ("neox", nudge(f"{PHI}input_layernorm.weight", 3, 1e-3), REWRITTEN),
    "bias of the neutral norm": ("neox", filled(f"{PHI}input_layernorm.bias", 1e-3), REWRITTEN),
    "norm of another layer": (
        "gptj",
        exchange(f"{STAR}input_layernorm.weight", f"{PHI}input_layernorm.weight"),
        REWRITTEN,
    ),
    "bias of the logits": ("neox", filled("lm_head.bias", 0.1), REWRITTEN),
    "bias of the logits lost": ("gptj", filled("lm_head.bias", 0.0), REWRITTEN),
    "queries not turned": ("gptj", unturned_query, REWRITTEN),
    "keys not turned": ("gptj", unturned_key, MERGED),
    "keys and values exchanged": (
        "gptj",
        exchange(f"{PHI}self_attn.k_proj.weight", f"{PHI}self_attn.v_proj.weight"),
        MERGED,
    ),
    "biases exchanged": ("serial", exchange(f"{PHI}self_attn.k_proj.bias", f"{PHI}self_attn.v_proj.bias"), MERGED),
    "a bias missing": ("serial", remove(f"{STAR}self_attn.o_proj.bias"), {"files"}),
    "a bias zero": ("serial", filled(f"{STAR}mlp.c_fc.bias", 0.0), REWRITTEN),
    "a bias where none was": ("serial, half", filled(f"{STAR}self_attn.o_proj.bias", 1.0), REWRITTEN),
    "values missing": ("serial", remove(f"{STAR}self_attn.v_proj.weight"), {"files"}),
    "other heads merged": ("serial", wrong_neighbours, MERGED),
    "heads cut otherwise": ("serial", thirds_for_heads, REWRITTEN),
    "quarters cut otherwise": ("codegen", thirds_for_quarters, MERGED),
    "not transposed": ("gpt2", not_transposed, REWRITTEN),
    "other type": ("gptj", change("model.final_layernorm.bias", lambda t: t.double()), REWRITTEN | {"index"}),
    "other shape": ("gptj", change("model.final_layernorm.bias", lambda t: t[:-1].clone()), REWRITTEN | {"index"}),
    "one layer with all heads": (
        "gptj",
        change(f"{PHI}self_attn.k_proj.weight", lambda t: t.repeat(4, 1)),
        MERGED | {"index"},
    ),
    "a tensor more": ("neox", add("model.layers.0.self_attn.rotary_emb.inv_freq"), NAMES),
    "a layer more": ("neox", add("model.layers.2.mlp.fc1.weight"), NAMES),
    "rotary base": ("neox", rotary("rope_theta", 501.0), CONFIG),
    "rotary base for new clients": ("gptj", rotary("rope_theta", 501.0, both=False), CONFIG),
    "rotary base for old clients": ("serial", config(rope_theta=10000.0), CONFIG),
    "rotary rows": ("neox", rotary("partial_rotary_factor", 0.25), CONFIG),
    "rotary rows for old clients": ("gptj", config(partial_rotary_factor=1.0), CONFIG),
    "rotary scaling": ("neox, tied", rotary("factor", 4.0, both=False), CONFIG),
    "rotary scaling for old clients": ("neox, tied", config(rope_scaling=None), CONFIG),
    "rotary scaling where none was": ("serial", rotary("rope_type", "linear", both=False), CONFIG),
    "epsilon": ("neox", config(layer_norm_eps=1e-5), CONFIG),
    "epsilon of starcoder2": ("serial", config(norm_epsilon=1e-6), CONFIG),
    "epsilon missing": ("gpt2", without("layer_norm_epsilon"), CONFIG),
    "activation": ("codegen", config(hidden_act="gelu_new"), CONFIG),
    "activation missing": ("gpt2", without("activation_function"), CONFIG),
    "tied": ("neox", config(tie_word_embeddings=True), CONFIG),
    "multi-query": ("gpt2", config(multi_query=False), CONFIG),
    "scores unscaled": ("gpt2", config(scale_attn_weights=False), CONFIG),
    "width of a head": ("neox", config(head_dim=16), CONFIG),
    "window": ("serial", config(sliding_window=4), CONFIG),
    "key norm": ("gptj", config(qk_layernorm=True), CONFIG),
    "layers": ("gptj", config(num_hidden_layers=1), CONFIG),
    "K/V heads": ("neox", config(num_key_value_heads=12), CONFIG),
    "a key of SOURCE's": ("neox", config(use_parallel_residual=True), CONFIG),
    "a key more": ("neox", config(quantization_config={}), CONFIG),
    "another class": ("neox", config(architectures=["PhiForSequenceClassification"]), CONFIG),
    "another type": ("neox", config(model_type="llama"), {"heads"}),
    "SOURCE's type": ("neox", config(model_type="gpt_neox"), {"heads"}),
    "the other home": ("neox", config(model_type="starcoder2"), CONFIG),
    "another route claimed": ("neox", claims(route="own file"), CLAIMS),
    "no error claimed": ("neox", claims(merge_error={}), CLAIMS),
    "other bytes claimed": ("gpt2", claims(kv_bytes_per_token=BYTES), CLAIMS),
    "another method claimed": ("gptj", claims(method="first"), MERGED),
    "no claims": ("gptj", lambda out, _: (out / "gqa_conversion.json").unlink(), CLAIMS | MERGED),
    "tokenizer": ("gptj", lambda out, _: edit_json(out / "tokenizer_config.json", unk_token="w1"), CARRIED),
    "tokenizer of GPT-2": ("gpt2", lambda out, _: edit_json(out / "tokenizer_config.json", unk_token="w1"), CARRIED),
    "another source claimed": ("gptj", lambda out, _: claim_source(out, model_type="phi"), CLAIMS),
    "another source's size": ("gptj", lambda out, _: claim_source(out, files={}), CLAIMS),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_in_the_files(conversions: Conversions, tmp_path: Path, name: str) -> None:
    source_name, damage, checks = DAMAGE[name]
    good, source = made(conversions, source_name)
    out = shutil.copytree(good, tmp_path / "out")
    damage(out, source)
    assert set(failed(verify_checkpoint(out, source, logits=False))) == checks


@pytest.mark.parametrize(
    "name",
    [
        "gain not in the queries",
        "gain not in the MLP",
        "norm's bias not folded",
        "gain of the neutral norm",
        "queries not turned",
        "a bias zero",
        "rotary base",
        "epsilon",
        "activation",
    ],
)
def test_what_the_models_compute_shows_it_too(conversions: Conversions, tmp_path: Path, name: str) -> None:
    source_name, damage, checks = DAMAGE[name]
    good, source = made(conversions, source_name)
    out = shutil.copytree(good, tmp_path / "out")
    damage(out, source)
    assert set(failed(verify_checkpoint(out, source))) == checks | {"logits", "cached decoding"}


def test_a_rewriting_that_computes_something_else_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """verify shares the rewriting with the converter, so only SOURCE's own class can tell."""
    monkeypatch.setattr(arrays, "rotary_order", lambda width, _: [*range(width)])
    source = make_source("gptj", tmp_path / "source")
    convert_checkpoint(source, tmp_path / "out", 3, ConversionOptions(method="mean"))
    assert set(failed(verify_checkpoint(tmp_path / "out", source))) == {"rewritten source"}


# Sources of other kinds
# ----------------------------------------------------------------------------------------------------------


def test_gpt2_as_it_lies_on_the_hub(tmp_path: Path) -> None:
    """No prefix, no tied head, masks that nothing reads; and a tensor that nothing is known of is not passed over."""
    source = make_source("gpt2", tmp_path / "source")
    file = source / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    save_file(tensors | {"h.0.attn.bias": torch.ones(1, 1, 4, 4)}, file, metadata={"format": "pt"})
    convert_checkpoint(source, tmp_path / "out", 1, ConversionOptions(method="mean"))
    assert failed(verify_checkpoint(tmp_path / "out", source)) == {}
    save_file(tensors | {"h.0.attn.extra": torch.ones(1, 1, 4, 4)}, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"h\.0\.attn\.extra"):
        verify_checkpoint(tmp_path / "out", source, logits=False)


def test_old_words_and_bin_files(conversions: Conversions, tmp_path: Path) -> None:
    """Pythia's config knows no rope_parameters; the result may be cut into files of its own."""
    _, source = made(conversions, "neox, half")
    old = shutil.copytree(source, tmp_path / "old", ignore=shutil.ignore_patterns("*.safetensors*"))
    state = {name: tensor for file in source.glob("*.safetensors") for name, tensor in load_file(file).items()}
    torch.save(state | {"gpt_neox.layers.0.attention.rotary_emb.inv_freq": torch.ones(1)}, old / "pytorch_model.bin")
    stated = json.loads((old / "config.json").read_text())
    del stated["rope_parameters"], stated["dtype"]
    stated |= {"rotary_pct": 0.25, "rotary_emb_base": 10000, "torch_dtype": "bfloat16"}
    (old / "config.json").write_text(json.dumps(stated))
    out = tmp_path / "out"
    convert_checkpoint(old, out, 4, ConversionOptions(max_shard_size=40_000, method="mean"))
    assert failed(verify_checkpoint(out, old)) == {}
    edit_json(out / "config.json", torch_dtype="float32")
    assert set(failed(verify_checkpoint(out, old, logits=False))) == {"config"}


def test_biases_that_stock_classes_pass_over(tmp_path: Path) -> None:
    """A config without them beside a file with them: the source's class passes over what the rewritten source has."""
    source = make_source("gpt_neox", tmp_path / "source")
    edit_json(source / "config.json", attention_bias=False)
    convert_checkpoint(source, tmp_path / "out", 3, ConversionOptions(method="mean"))
    assert "rewritten source" in failed(verify_checkpoint(tmp_path / "out", source))


@pytest.mark.parametrize(("model_type", "groups"), [("gpt_neox", 3), ("gptj", 3), ("codegen", 3), ("gpt2", 1)])
def test_tokenizers(model_type: str, groups: int, tmp_path: Path) -> None:
    """The same ids and texts, whatever class transformers has for OUT's type."""
    source, out = make_source(model_type, tmp_path / "source"), tmp_path / "out"
    for stated in ({}, {"model_max_length": 64}):
        save_byte_pairs(source, **stated)
        convert_checkpoint(source, out, groups, ConversionOptions(overwrite=True, method="mean"))
        report = verify_checkpoint(out, source)
        assert failed(report) == {}
        ours, theirs = (word for word in details(report)["tokenizer"].split() if "Tokenizer" in word)
        assert (ours != theirs) == (model_type == "gpt2")
    if model_type == "gpt2":
        (out / "tokenizer_config.json").unlink()
        assert set(failed(verify_checkpoint(out, source))) == {"carried files", "tokenizer"}


def test_half_precision(conversions: Conversions, monkeypatch: pytest.MonkeyPatch) -> None:
    """As models of more than three billion parameters run."""
    monkeypatch.setattr(models, "FLOAT32_LIMIT", 0)
    for name in ("neox, half", "serial, half", "gptj, half", "codegen, half", "gpt2, half"):
        report = verify_checkpoint(*made(conversions, name))
        assert failed(report) == {}
        assert "float16" in details(report)["loads"]
