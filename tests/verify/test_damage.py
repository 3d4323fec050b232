"""Whatever is wrong with the files of a result, or with what it claims, fails the check that is
about it.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gqa_convert.verify import verify_checkpoint
from tests.helpers.verification import (
    Damage,
    Made,
    change,
    claims,
    config,
    edit,
    edit_json,
    failed,
    flip,
    remove,
    tensor_of,
    without,
)

MERGED, UNTOUCHED, SPANS = {"merged tensors"}, {"untouched tensors"}, {"spans"}
FILES, CONFIG, CLAIMS, HEADERS = {"files"}, {"config"}, {"provenance"}, {"tensor headers"}
CARRIED, HASHES = {"copied files"}, {"hashes"}

STEM, FIRST = "model.layers.1.self_attn", "model.layers.0.self_attn"
QUERY, KEY, NORM = f"{STEM}.q_proj.weight", f"{STEM}.k_proj.weight", "model.norm.weight"
VALUE, OUTPUT = f"{STEM}.v_proj.weight", f"{STEM}.o_proj.weight"
NEOX = "gpt_neox.layers.1.attention.query_key_value.weight"
GPT2 = "transformer.h.0.attn"
GPTJ = "transformer.h.1.attn"
CROSS = "transformer.h.1.crossattention"
OPT = "model.decoder.layers.0.self_attn.v_proj.bias"
BART = "model.encoder.layers.0.self_attn"
FALCON = "transformer.h.1.self_attention.query_key_value.weight"
SIGNED = "model.layers.1.mlp.fc1.bias"
WIDTH = 12  # of a head of "llama, float32", with 12 heads in 3 groups


# Ways to damage a result
# --------------------------------------------------------------------------------------------------


def put(out: Path, name: str, value: torch.Tensor) -> None:
    edit(out, name, lambda old: value.to(old.dtype).reshape(old.shape).contiguous())


def filled(name: str, value: float) -> Damage:
    return change(name, lambda tensor: torch.full_like(tensor, value))


def scale(
    name: str, by: float = 1.05, first: int = 0, last: int | None = None, axis: int = 0
) -> Damage:
    def changed(tensor: torch.Tensor) -> torch.Tensor:
        tensor.narrow(axis, first, (tensor.shape[axis] if last is None else last) - first).mul_(by)
        return tensor

    return change(name, changed)


def exchange(name: str, a: int, b: int, width: int, axis: int = 0) -> Damage:
    """Exchange two heads of a width."""

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        one, other = tensor.narrow(axis, a * width, width), tensor.narrow(axis, b * width, width)
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)
        return tensor

    return change(name, changed)


def nudge(name: str, by: float) -> Damage:
    """Change the third row by a share of the tensor's size."""

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        tensor[2] += by * tensor.norm() / tensor.numel() ** 0.5
        return tensor

    return change(name, changed)


def noise(name: str, share: float, head: int, width: int = 12) -> Damage:
    """Add noise to the rows of a head, as a share of their size."""

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        rows = tensor.narrow(0, head * width, width)
        random = torch.randn(rows.shape, generator=torch.Generator().manual_seed(0))
        rows += (share * rows.float().norm() / random.norm() * random).to(rows.dtype)
        return tensor

    return change(name, changed)


def write(name: str, content: bytes | str) -> Damage:
    def damage(out: Path, _: Path) -> None:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return damage


def delete(*patterns: str) -> Damage:
    return lambda out, _: [
        path.unlink() for pattern in patterns for path in sorted(out.glob(pattern))
    ]


def truncate(out: Path, _: Path) -> None:
    file = sorted(out.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-4])


def add(name: str) -> Damage:
    def damage(out: Path, _: Path) -> None:
        file = sorted(out.glob("*.safetensors"))[0]
        save_file(load_file(file) | {name: torch.ones(2)}, file, metadata={"format": "pt"})

    return damage


def misplace(out: Path, _: Path) -> None:
    path = out / "model.safetensors.index.json"
    placed = json.loads(path.read_text())["weight_map"]
    other = next(file for file in sorted(set(placed.values())) if file != placed[KEY])
    edit_json(path, weight_map=placed | {KEY: other})


def inside(file: str, key: str, **changes: Any) -> Damage:
    """Change entries of an object in a file."""
    return lambda out, _: edit_json(
        out / file, **{key: json.loads((out / file).read_text())[key] | changes}
    )


def claim_source_hash(out: Path, _: Path) -> None:
    record = json.loads((out / "gqa_conversion.json").read_text())
    record["source"]["files"]["config.json"]["sha256"] = "0"
    (out / "gqa_conversion.json").write_text(json.dumps(record))


# Results that are wrong in a way of their own
# --------------------------------------------------------------------------------------------------


def five_heads(out: Path, _: Path) -> None:
    """As many in every layer, and no divisor of twelve."""
    for name in (f"{stem}.{part}_proj.weight" for stem in (STEM, FIRST) for part in "kv"):
        edit(out, name, lambda tensor: torch.cat([tensor, tensor[:16]]))


def without_gain(out: Path, source: Path) -> None:
    """Queries into which no norm is folded."""
    gain = tensor_of(source, "gpt_neox.layers.1.input_layernorm.weight").double()
    put(out, f"{STEM}.q_proj.weight", tensor_of(out, f"{STEM}.q_proj.weight").double() / gain)


LLAMA, FACTORED, SMALL = ("llama", 3), ("llama, float32", 3, "factor"), ("qwen2", 3, "factor")
TRAINED = ("llama, float32", 3, "fit")
CONV1D, FUSED, CROSSED = ("gpt2", 3, "factor"), ("gpt_neox", 4), ("gpt2, cross", 4)
OPTS = ("opt", 4)

DAMAGE: dict[str, tuple[tuple[Any, ...], Damage, set[str]]] = {
    # one bit, anywhere
    "a bit of an embedding": (LLAMA, change("model.embed_tokens.weight", flip(5)), UNTOUCHED),
    "a bit of a query": (LLAMA, change(QUERY, flip(70)), UNTOUCHED),
    "a bit of a key": (LLAMA, change(KEY, flip(8)), MERGED),
    "a bit of a key bias": (("qwen2", 3, "first"), change(f"{STEM}.k_proj.bias", flip(4)), MERGED),
    "a bit of a shared norm": (("olmo2", 3), change(f"{STEM}.k_norm.weight", flip(9)), MERGED),
    "a bit of a head's norm": (
        ("cohere", 3, "first"),
        change(f"{STEM}.k_norm.weight", flip(2)),
        MERGED,
    ),
    "a bit of a listed norm": (
        ("stablelm", 3),
        change(f"{STEM}.k_layernorm.norms.1.weight", flip(0)),
        MERGED,
    ),
    "a bit of a fused query": (("phi3", 3), change(f"{STEM}.qkv_proj.weight", flip(95)), MERGED),
    "a bit of a fused value": (("phi3", 3), change(f"{STEM}.qkv_proj.weight", flip(-1)), MERGED),
    "a bit of a column": (("gpt2", 4), change(f"{GPT2}.c_attn.weight", flip(40)), MERGED),
    "a bit of a fused bias": (("gpt2", 4), change(f"{GPTJ}.c_attn.bias", flip(96)), MERGED),
    "a bit of a grouped query": (("falcon, 40B", 2), change(FALCON, flip(40)), MERGED),
    "a bit of cross-attention": (CROSSED, change(f"{CROSS}.q_attn.weight", flip(0)), UNTOUCHED),
    # heads
    "swapped heads": (LLAMA, exchange(KEY, 0, 1, 8), MERGED),
    "five heads": (LLAMA, five_heads, {"heads"}),
    "one layer with all heads": (
        LLAMA,
        change(KEY, lambda t: t.repeat_interleave(4, dim=0)),
        HEADERS,
    ),
    "query heads swapped": (FUSED, exchange(NEOX, 0, 1, 8), MERGED),
    "keys and values of cross-attention": (
        CROSSED,
        exchange(f"{CROSS}.c_attn.weight", 0, 1, 32, 1),
        MERGED,
    ),
    "bias not merged": (
        ("opt", 4),
        lambda out, s: edit(out, OPT, lambda _: tensor_of(s, OPT)),
        HEADERS,
    ),
    "bias missing": (("opt", 4), remove(OPT), HEADERS),
    "encoder left alone, changed": (
        ("bart", 4),
        change(f"{BART}.k_proj.weight", flip(95)),
        UNTOUCHED,
    ),
    "encoder with fewer heads": (
        ("bart", 4),
        change(f"{BART}.v_proj.weight", lambda t: t[:24].clone()),
        HEADERS,
    ),
    # rewritten sources
    "gain not in the queries": (("neox", 3), without_gain, UNTOUCHED),
    "folded bias off": (("neox", 3), nudge(SIGNED, 1e-5), UNTOUCHED),
    "gain of the neutral norm": (
        ("neox", 3),
        scale("model.layers.1.input_layernorm.weight", 1.001),
        UNTOUCHED,
    ),
    "one layer more": (("neox", 3), add("model.layers.2.mlp.fc1.weight"), HEADERS),
    "rotary base": (
        ("neox", 3),
        inside("config.json", "rope_parameters", rope_theta=501.0),
        CONFIG,
    ),
    "rotary scaling for old clients": (("neox, tied", 3), config(rope_scaling=None), CONFIG),
    "SOURCE's type": (("neox", 3), config(model_type="gpt_neox"), {"heads"}),
    "multi-query": (("gpt2 as gpt_bigcode", 1), config(multi_query=False), CONFIG),
    "another route claimed": (("neox", 3), claims(route="own file"), CLAIMS),
    "another hash of SOURCE claimed": (LLAMA, claim_source_hash, CLAIMS),
    "another source claimed": (("neox", 3), claims(source={"model_type": "phi"}), CLAIMS),
    # tensors and files
    "missing tensor": (LLAMA, remove(NORM), FILES),
    "extra tensor": (LLAMA, add("model.more.weight"), FILES),
    "negative zero": (LLAMA, change(NORM, lambda t: t * -0.0), UNTOUCHED),
    "other type": (LLAMA, change(NORM, lambda t: t.float()), HEADERS),
    "other type of a key": (LLAMA, change(KEY, lambda t: t.float()), HEADERS),
    "other shape": (LLAMA, change(NORM, lambda t: t.reshape(2, -1)), HEADERS),
    "not finite": (LLAMA, change(KEY, lambda t: t * torch.nan), MERGED),
    "stale weights": (LLAMA, write("pytorch_model.bin", b"x"), FILES),
    "stale weights in a folder": (LLAMA, write("onnx/model.onnx", b"x"), FILES),
    "truncated shard": (LLAMA, truncate, FILES),
    "missing shard": (LLAMA, delete("model-00003*"), FILES),
    "no weights": (LLAMA, delete("*.safetensors*"), FILES),
    "index names another file": (LLAMA, misplace, FILES),
    "index is no JSON": (LLAMA, write("model.safetensors.index.json", "{"), FILES),
    "changed tokenizer": (
        LLAMA,
        lambda out, _: edit_json(out / "tokenizer.json", version="2"),
        CARRIED,
    ),
    "changed setting of the tokenizer": (
        LLAMA,
        lambda out, _: edit_json(out / "tokenizer_config.json", model_max_length=7),
        CARRIED,
    ),
    "missing template": (LLAMA, delete("chat_template.jinja"), CARRIED),
    "new code": (LLAMA, write("modeling.py", "x"), CARRIED),
    "no modelling file": (("mpt", 4), delete("gqa_mpt.py"), CARRIED),
    "a modelling file cut short": (("mpt", 4), write("gqa_mpt.py", "import torch\n"), CARRIED),
    # the config
    "wrong count": (LLAMA, config(num_key_value_heads=4), CONFIG),
    "wrong group number": (LLAMA, config(multi_query_group_num=12), CONFIG),
    "not multi-query": (LLAMA, config(multi_query_attention=1), CONFIG),
    "changed theta": (LLAMA, config(rope_parameters={"rope_type": "default"}), CONFIG),
    "quantised": (LLAMA, config(quantization_config={"quant_method": "fp8"}), CONFIG),
    "no config": (LLAMA, delete("config.json"), CONFIG),
    "config is a list": (LLAMA, write("config.json", "[]"), CONFIG),
    "stock type": (("t5", 4), config(model_type="t5"), CONFIG),
    "stock class": (("t5", 4), config(architectures=["T5ForConditionalGeneration"]), CONFIG),
    "no auto_map": (("t5", 4), without("auto_map"), CONFIG),
    "another class": (
        OPTS,
        inside("config.json", "auto_map", AutoModelForCausalLM="evil.Model"),
        CONFIG,
    ),
    "a tokenizer's code": (
        OPTS,
        inside("config.json", "auto_map", AutoTokenizer="evil.Tokenizer"),
        CONFIG,
    ),
    "no tokenizer class": (("mpt", 4), without("tokenizer_class"), CONFIG),
    "encoder's count in the config": (("bart", 4), config(encoder_num_key_value_heads=4), CONFIG),
    # what is claimed
    "claims other groups": (LLAMA, claims(kv_heads=4), CLAIMS),
    "claims other heads": (LLAMA, claims(source_kv_heads=6), CLAIMS),
    "claims another type": (LLAMA, claims(model_type="mistral"), CLAIMS),
    "claims to be trained": (LLAMA, claims(uptraining_tokens=9), CLAIMS),
    "claims another method": (LLAMA, claims(method="first"), MERGED),
    "claims an unknown method": (LLAMA, claims(method="magic"), MERGED),
    "claims nothing": (LLAMA, delete("gqa_conversion.json"), CLAIMS | MERGED),
    "a list for hashes": (SMALL, claims(written=[]), HASHES),
    "a number for a hash": (SMALL, claims(written={"model.safetensors": 1}), HASHES),
    "no hashes": (SMALL, claims(written={}), HASHES),
    "hashes of another file": (SMALL, claims(written={"other": {"sha256": "0"}}), HASHES),
    # heads that absorb
    "NaN in a query": (FACTORED, filled(QUERY, math.nan), MERGED),
    "another shape": (FACTORED, change(QUERY, lambda t: t[:-WIDTH].clone()), HEADERS),
    "another type of an output": (
        FACTORED,
        change(f"{STEM}.o_proj.weight", torch.Tensor.double),
        HEADERS,
    ),
    "keys of zeros": (FACTORED, filled(KEY, 0.0), SPANS),
    "queries of zeros": (FACTORED, filled(QUERY, 0.0), SPANS),
    "outputs of zeros": (FACTORED, filled(OUTPUT, 0.0), SPANS),
    "a key head of noise": (FACTORED, noise(KEY, 10.0, head=1), SPANS),
    "a key head with some noise": (FACTORED, noise(KEY, 0.1, head=1), SPANS),
    "a value head with some noise": (
        ("llama", 4, "factor"),
        noise(VALUE, 0.1, head=3, width=8),
        SPANS,
    ),
    "a query head with some noise": (FACTORED, noise(QUERY, 0.1, head=7), SPANS),
    "query heads exchanged": (FACTORED, exchange(QUERY, 0, 1, WIDTH), SPANS),
    "outputs of heads exchanged": (FACTORED, exchange(OUTPUT, 4, 5, WIDTH, axis=1), SPANS),
    "K/V heads exchanged": (FACTORED, exchange(VALUE, 0, 2, WIDTH), SPANS),
    "smaller values": (FACTORED, scale(VALUE, 0.99), SPANS),
    "a larger head among all": (("llama, one file", 1, "factor"), scale(VALUE, 1.01), SPANS),
    "another order of heads": (FACTORED, claims(head_order={STEM: [*range(11, -1, -1)]}), SPANS),
    "no order of heads": (FACTORED, claims(head_order={STEM: [0] * 12}), SPANS),
    "fitted keys of zeros": (TRAINED, filled(KEY, 0.0), SPANS),
    "fitted queries of zeros": (TRAINED, filled(QUERY, 0.0), SPANS),
    "a fitted key head of noise": (TRAINED, noise(KEY, 10.0, head=1), SPANS),
    "fitted query heads exchanged": (TRAINED, exchange(QUERY, 0, 1, WIDTH), SPANS),
    "an MLP changed": (FACTORED, nudge("model.layers.0.mlp.down_proj.weight", 0.02), UNTOUCHED),
    "normalised keys absorbed": (
        ("olmo2", 3, "factor"),
        scale(f"{FIRST}.q_proj.weight", 1.01),
        UNTOUCHED,
    ),
    "normalised keys not the mean": (
        ("olmo2", 3, "factor"),
        scale(f"{FIRST}.k_proj.weight", 1.01),
        MERGED,
    ),
    "an output bias changed": (CONV1D, scale(f"{GPT2}.c_proj.bias"), UNTOUCHED),
    "the mean claimed": (FACTORED, claims(method="mean"), UNTOUCHED | MERGED),
    "fit claimed": (FACTORED, claims(method="fit"), CLAIMS),
}
"""By name: the arguments of `made`; the damage; the checks that fail."""


def damaged(made: Made, row: tuple[Any, ...], damage: Damage, folder: Path) -> tuple[Path, Path]:
    """A damaged copy of a result, and SOURCE."""
    good, source = made(*row)
    out = shutil.copytree(good, folder / "out")
    damage(out, source)
    return out, source


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found(made: Made, tmp_path: Path, name: str) -> None:
    row, damage, checks = DAMAGE[name]
    out, source = damaged(made, row, damage, tmp_path)
    report = verify_checkpoint(out, source, logits=False)
    assert set(failed(report)) == checks
    assert all("\n" not in check.detail for check in report.checks)


@pytest.mark.parametrize(
    "name",
    ["gain not in the queries", "gain of the neutral norm", "rotary base", "query heads swapped"],
)
def test_what_the_models_compute_shows_it_too(made: Made, tmp_path: Path, name: str) -> None:
    row, damage, checks = DAMAGE[name]
    found = set(failed(verify_checkpoint(*damaged(made, row, damage, tmp_path))))
    assert checks | {"logits"} <= found <= checks | {"logits", "cached decoding", "eager attention"}


def test_a_mean_is_off_by_half_a_unit_at_most(made: Made, tmp_path: Path) -> None:
    """Keys that absorb nothing are rounded means. One number, whose mean lies nearest to the middle
    between two, becomes the other of the two, which is wrong by hardly more than half a unit.
    """
    name = f"{STEM}.k_proj.weight"

    def round_otherwise(out: Path, source: Path) -> None:
        mean = tensor_of(source, name).double().unflatten(0, (3, 4, -1)).mean(1).flatten(0, 1)

        def change(ours: torch.Tensor) -> torch.Tensor:
            away = torch.where(mean.abs() > ours.abs(), 1, -1).to(torch.int16)
            other = (ours.view(torch.int16) + away).view(ours.dtype)
            units = (other.double() - mean).abs() / (other.double() - ours.double()).abs()
            nearest = units[units > 0.5].min()
            assert nearest < 0.51
            return torch.where(units == nearest, other, ours)

        edit(out, name, change)

    out, source = damaged(made, ("olmo2", 3, "factor"), round_otherwise, tmp_path)
    assert set(failed(verify_checkpoint(out, source, logits=False))) == MERGED


# Results whose heads absorb
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fit", "factor"])
def test_what_is_worse_than_the_mean_fails(made: Made, tmp_path: Path, method: str) -> None:
    def worsen(out: Path, _: Path) -> None:
        for stem in (STEM, FIRST):
            edit(out, f"{stem}.o_proj.weight", lambda tensor: -3 * tensor)

    out, source = damaged(made, ("qwen2", 3, method), worsen, tmp_path)
    assert set(failed(verify_checkpoint(out, source))) == {"module outputs"}


def test_one_bad_module_does_not_hide_in_a_good_fit(made: Made, tmp_path: Path) -> None:
    """The predictions stay nearer to SOURCE's than those of mean pooling."""

    def exchange_heads(out: Path, source: Path) -> None:
        for name, axis in (("k_proj", 0), ("v_proj", 0), ("o_proj", 1)):
            exchange(f"{STEM}.{name}.weight", 0, 1, WIDTH, axis)(out, source)
        edit(out, f"{STEM}.o_proj.weight", lambda tensor: -0.7 * tensor)

    out, source = damaged(made, ("llama, float32", 3, "fit"), exchange_heads, tmp_path)
    assert set(failed(verify_checkpoint(out, source))) == {"spans", "module outputs"}


@pytest.mark.parametrize("row", [SMALL, ("neox", 3, "fit")])
def test_one_bit_of_what_can_t_be_recomputed(
    made: Made, tmp_path: Path, row: tuple[Any, ...]
) -> None:
    """No other check sees it; the hash that was recorded does."""
    out, source = damaged(made, row, lambda *_: None, tmp_path)
    record = (out / "gqa_conversion.json").read_text()
    edit(out, f"{STEM}.{'dense' if row[0] == 'neox' else 'o_proj'}.weight", flip(0))
    (out / "gqa_conversion.json").write_text(record)
    found = failed(verify_checkpoint(out, source, logits=False))
    assert set(found) == {"hashes"}
    assert "it has changed since it was written" in found["hashes"]
