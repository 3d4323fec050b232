"""Whatever is wrong with the files of a result, or with what it claims, fails the check that is about it."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.verify import verify_checkpoint
from gqa_convert.verify.geometry import Heads
from gqa_convert.verify.inputs import read_inputs
from gqa_convert.verify.optimum import compare_products, group_products, module_losses, read_orders, relative_error
from gqa_convert.verify.result import read_result
from gqa_convert.verify.weights import Weights
from tests.helpers.verification import (
    Damage,
    Made,
    change,
    claim,
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

MERGED, UNTOUCHED, FUNCTIONS = {"merged tensors"}, {"untouched tensors"}, {"attention functions"}
FILES, CONFIG, CLAIMS, NAMES = {"files"}, {"config"}, {"provenance"}, {"tensor names"}
CODE, CARRIED, HASHES = {"modelling file"}, {"copied files"}, {"hashes"}

STEM, FIRST = "model.layers.1.self_attn", "model.layers.0.self_attn"
QUERY, KEY, NORM = f"{STEM}.q_proj.weight", f"{STEM}.k_proj.weight", "model.norm.weight"
NEOX = "gpt_neox.layers.1.attention.query_key_value.weight"
GPT2 = "transformer.h.0.attn"
GPTJ = "transformer.h.1.attn"
CROSS = "transformer.h.1.crossattention"
OPT = "model.decoder.layers.0.self_attn.v_proj.bias"
BART = "model.encoder.layers.0.self_attn"
T5 = "decoder.block.0.layer.1.EncDecAttention"
FALCON = "transformer.h.1.self_attention.query_key_value.weight"
SIGNED = "model.layers.1.mlp.fc1.bias"
WIDTH = 12  # of a head of "llama, float32", with 12 heads in 3 groups


# Ways to damage a result
# ---------------------------------------------------------------------------------------------------------


def put(out: Path, name: str, value: torch.Tensor) -> None:
    edit(out, name, lambda old: value.to(old.dtype).reshape(old.shape).contiguous())


def filled(name: str, value: float) -> Damage:
    return change(name, lambda tensor: torch.full_like(tensor, value))


def scale(name: str, by: float = 1.05, first: int = 0, last: int | None = None, axis: int = 0) -> Damage:
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


def write(name: str, content: bytes | str) -> Damage:
    def damage(out: Path, _: Path) -> None:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return damage


def delete(*patterns: str) -> Damage:
    return lambda out, _: [path.unlink() for pattern in patterns for path in sorted(out.glob(pattern))]


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
    return lambda out, _: edit_json(out / file, **{key: json.loads((out / file).read_text())[key] | changes})


def claim_errors(change: Callable[[dict[str, float]], dict[str, float]]) -> Damage:
    def damage(out: Path, _: Path) -> None:
        errors = json.loads((out / "gqa_conversion.json").read_text())["merge_error"]
        claim(out, merge_error=errors | change(errors))

    return damage


# Results that are wrong in a way of their own
# ---------------------------------------------------------------------------------------------------------


def five_heads(out: Path, _: Path) -> None:
    """As many in every layer, and no divisor of twelve."""
    for name in (f"{stem}.{part}_proj.weight" for stem in (STEM, FIRST) for part in "kv"):
        edit(out, name, lambda tensor: torch.cat([tensor, tensor[:16]]))


def without_gain(out: Path, source: Path) -> None:
    """Queries into which no norm is folded."""
    gain = tensor_of(source, "gpt_neox.layers.1.input_layernorm.weight").double()
    put(out, f"{STEM}.q_proj.weight", tensor_of(out, f"{STEM}.q_proj.weight").double() / gain)


def mean_of_all(out: Path, source: Path) -> None:
    """What mean pooling makes, in a result of another method."""
    for name, part in ((f"{stem}.{part}_proj.weight", part) for stem in (STEM, FIRST) for part in "qkvo"):
        theirs = tensor_of(source, name)
        put(out, name, theirs.unflatten(0, (3, 4, WIDTH)).mean(1) if part in "kv" else theirs)


def turn(rows: torch.Tensor, pairs: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """Rows [..., c, n] of heads, of which pairs [2, f] are turned by an angle each."""
    result, angle = rows.clone(), angle[:, None]
    real, imaginary = rows[..., pairs[0], :], rows[..., pairs[1], :]
    result[..., pairs[0], :] = angle.cos() * real - angle.sin() * imaginary
    result[..., pairs[1], :] = angle.sin() * real + angle.cos() * imaginary
    return result


def turned(*pairs_shape: int) -> Damage:
    """Keys and queries turned by one angle in pairs of rows, as the order of the rows in this shape has them."""
    pairs = torch.arange(WIDTH).reshape(pairs_shape)
    pairs = pairs if len(pairs) == 2 else pairs.T

    def damage(out: Path, _: Path) -> None:
        for part in "qk":
            edit(
                out,
                f"{STEM}.{part}_proj.weight",
                lambda t: turn(t.unflatten(0, (-1, WIDTH)), pairs, torch.linspace(0.5, 1.5, WIDTH // 2)).flatten(0, 1),
            )

    return damage


LLAMA, FACTORED, SMALL = ("llama", 3), ("llama, float32", 3, "factor"), ("qwen2", 3, "factor")
BIASED, CONV1D, FUSED, CROSSED = ("neox", 3, "factor"), ("gpt2", 3, "factor"), ("gpt_neox", 4), ("gpt2, cross", 4)
GROUPED, ENCODED, NEO = ("llama, 4 heads", 2, "factor"), ("bart", 4, "encoder"), ("gpt_neo", 4)
VALUES, OTHER = f"{STEM}.values", "model.layers.7.self_attn"
BYTES = {"before": 1, "after": 1}
CROSS_BYTES = {"before": 1536, "after": 1536}

DAMAGE: dict[str, tuple[tuple[Any, ...], Damage, set[str]]] = {
    # one bit, anywhere
    "a bit of an embedding": (LLAMA, change("model.embed_tokens.weight", flip(5)), UNTOUCHED),
    "a bit of a query": (LLAMA, change(QUERY, flip(70)), UNTOUCHED),
    "a bit of a key": (LLAMA, change(KEY, flip(8)), MERGED),
    "a bit of a key bias": (("qwen2", 3, "first"), change(f"{STEM}.k_proj.bias", flip(4)), MERGED),
    "a bit of a shared norm": (("olmo2", 3), change(f"{STEM}.k_norm.weight", flip(9)), MERGED),
    "a bit of a head's norm": (("cohere", 3, "first"), change(f"{STEM}.k_norm.weight", flip(2)), MERGED),
    "a bit of a listed norm": (("stablelm", 3), change(f"{STEM}.k_layernorm.norms.1.weight", flip(0)), MERGED),
    "a bit of a fused query": (("phi3", 3), change(f"{STEM}.qkv_proj.weight", flip(95)), MERGED),
    "a bit of a fused value": (("phi3", 3), change(f"{STEM}.qkv_proj.weight", flip(-1)), MERGED),
    "a bit of a column": (("gpt2", 4), change(f"{GPT2}.c_attn.weight", flip(40)), MERGED),
    "a bit of a fused bias": (("gpt2", 4), change(f"{GPTJ}.c_attn.bias", flip(96)), MERGED),
    "a bit of a grouped query": (("falcon, 40B", 2), change(FALCON, flip(40)), MERGED),
    "a bit of cross-attention": (CROSSED, change(f"{CROSS}.q_attn.weight", flip(0)), UNTOUCHED),
    # heads
    "swapped heads": (LLAMA, exchange(KEY, 0, 1, 8), MERGED),
    "five heads": (LLAMA, five_heads, {"heads"}),
    "one layer with all heads": (LLAMA, change(KEY, lambda t: t.repeat_interleave(4, dim=0)), MERGED | {"index"}),
    "query heads swapped": (FUSED, exchange(NEOX, 0, 1, 8), MERGED),
    "keys and values of cross-attention": (CROSSED, exchange(f"{CROSS}.c_attn.weight", 0, 1, 32, 1), MERGED),
    "bias not merged": (("opt", 4), lambda out, s: edit(out, OPT, lambda _: tensor_of(s, OPT)), MERGED),
    "bias missing": (("opt", 4), remove(OPT), NAMES | MERGED),
    "encoder left alone, changed": (("bart", 4), change(f"{BART}.k_proj.weight", flip(95)), UNTOUCHED),
    "encoder converted, changed": (ENCODED, change(f"{BART}.k_proj.bias", flip(0)), MERGED),
    "encoder of another count": (ENCODED, change(f"{BART}.v_proj.weight", lambda t: t[:24].clone()), {"heads"}),
    # rewritten sources
    "gain not in the queries": (("neox", 3), without_gain, UNTOUCHED),
    "folded bias off": (("neox", 3), nudge(SIGNED, 1e-5), UNTOUCHED),
    "gain of the neutral norm": (("neox", 3), scale("model.layers.1.input_layernorm.weight", 1.001), UNTOUCHED),
    "one layer more": (("neox", 3), add("model.layers.2.mlp.fc1.weight"), NAMES),
    "rotary base": (("neox", 3), inside("config.json", "rope_parameters", rope_theta=501.0), CONFIG),
    "rotary scaling for old clients": (("neox, tied", 3), config(rope_scaling=None), CONFIG),
    "the other home": (("neox", 3), config(model_type="starcoder2"), CONFIG),
    "SOURCE's type": (("neox", 3), config(model_type="gpt_neox"), {"heads"}),
    "multi-query": (("gpt2 as gpt_bigcode", 1), config(multi_query=False), CONFIG),
    "another route claimed": (("neox", 3), claims(route="own file"), CLAIMS),
    "another source claimed": (("neox", 3), claims(source={"model_type": "phi"}), CLAIMS),
    # tensors and files
    "missing tensor": (LLAMA, remove(NORM), FILES),
    "extra tensor": (LLAMA, add("model.more.weight"), FILES),
    "negative zero": (LLAMA, change(NORM, lambda t: t * -0.0), UNTOUCHED),
    "other type": (LLAMA, change(NORM, lambda t: t.float()), UNTOUCHED | {"index"}),
    "other type of a key": (LLAMA, change(KEY, lambda t: t.float()), MERGED | {"index"}),
    "other shape": (LLAMA, change(NORM, lambda t: t.reshape(2, -1)), UNTOUCHED),
    "not finite": (LLAMA, change(KEY, lambda t: t * torch.nan), MERGED),
    "stale weights": (LLAMA, write("pytorch_model.bin", b"x"), FILES),
    "stale weights in a folder": (LLAMA, write("onnx/model.onnx", b"x"), FILES),
    "truncated shard": (LLAMA, truncate, FILES),
    "missing shard": (LLAMA, delete("model-00003*"), FILES),
    "no weights": (LLAMA, delete("*.safetensors*"), FILES),
    "index names another file": (LLAMA, misplace, FILES),
    "index is no JSON": (LLAMA, write("model.safetensors.index.json", "{"), FILES),
    "wrong total": (LLAMA, inside("model.safetensors.index.json", "metadata", total_size=12), {"index"}),
    "changed tokenizer": (LLAMA, lambda out, _: edit_json(out / "tokenizer.json", version="2"), CARRIED),
    "changed setting of the tokenizer": (
        LLAMA,
        lambda out, _: edit_json(out / "tokenizer_config.json", model_max_length=7),
        CARRIED,
    ),
    "missing template": (LLAMA, delete("chat_template.jinja"), CARRIED),
    "new code": (LLAMA, write("modeling.py", "x"), CARRIED),
    "no modelling file": (("mpt", 4), delete("gqa_mpt.py"), CODE),
    "a modelling file cut short": (("mpt", 4), write("gqa_mpt.py", "import torch\n"), CODE),
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
    "no auto_map": (("t5", 4), without("auto_map"), CONFIG | CODE),
    "another class": (NEO, inside("config.json", "auto_map", AutoModelForCausalLM="evil.Model"), CONFIG | CODE),
    "a tokenizer's code": (NEO, inside("config.json", "auto_map", AutoTokenizer="evil.Tokenizer"), CONFIG),
    "no tokenizer class": (("mpt", 4), without("tokenizer_class"), CONFIG),
    "encoder's count in the config": (("bart", 4), config(encoder_num_key_value_heads=4), CONFIG),
    "encoder's count missing": (ENCODED, without("encoder_num_key_value_heads"), CONFIG),
    # what is claimed
    "claims other groups": (LLAMA, claims(groups=4), CLAIMS),
    "claims other heads": (LLAMA, claims(source_kv_heads=6), CLAIMS),
    "claims another type": (LLAMA, claims(model_type="mistral"), CLAIMS),
    "claims other bytes": (LLAMA, claims(kv_bytes_per_token=BYTES), CLAIMS),
    "claims no error": (LLAMA, claims(merge_error={}), CLAIMS),
    "claims small errors": (LLAMA, claim_errors(lambda errors: dict.fromkeys(errors, 0.01)), CLAIMS),
    "claims to be trained": (LLAMA, claims(uptraining_tokens=9), CLAIMS),
    "claims another method": (LLAMA, claims(method="first"), MERGED),
    "claims an unknown method": (LLAMA, claims(method="magic"), MERGED),
    "claims nothing": (LLAMA, delete("gqa_conversion.json"), CLAIMS | MERGED),
    "encoder said to be converted": (("bart", 4), claims(encoder=True), CLAIMS),
    "encoder said to be left alone": (ENCODED, claims(encoder=False), CLAIMS),
    "cross-attention's heads": (("t5", 4), claims(cross_kv_bytes_per_encoder_token=CROSS_BYTES), CLAIMS),
    "no cross-attention cache": (("t5", 4), claims(cross_kv_bytes_per_encoder_token=None), CLAIMS),
    "a cross-attention cache": (("gpt2", 4), claims(cross_kv_bytes_per_encoder_token=CROSS_BYTES), CLAIMS),
    "a list for hashes": (SMALL, claims(result=[]), HASHES),
    "a number for a hash": (SMALL, claims(result={"files": [1]}), HASHES),
    "no hashes": (SMALL, claims(result={"files": {}}), HASHES),
    "hashes of another file": (SMALL, claims(result={"files": {"other": {"sha256": "0"}}}), HASHES),
    # functions of attention
    "two keys exchanged": (FACTORED, exchange(KEY, 0, 1, WIDTH), FUNCTIONS),
    "a query's sign": (FACTORED, scale(QUERY, -1, 0, WIDTH), FUNCTIONS),
    "an output row nudged": (FACTORED, nudge(f"{STEM}.o_proj.weight", 0.02), FUNCTIONS),
    "the mean": (FACTORED, mean_of_all, FUNCTIONS),
    "wrong rotary pairs": (FACTORED, turned(WIDTH // 2, 2), FUNCTIONS),
    "NaN in a query": (FACTORED, filled(QUERY, math.nan), MERGED | FUNCTIONS),
    "another shape": (FACTORED, change(QUERY, lambda t: t[:-WIDTH].clone()), MERGED | FUNCTIONS | {"index"}),
    "another type of an output": (FACTORED, change(f"{STEM}.o_proj.weight", torch.Tensor.double), MERGED | {"index"}),
    "an MLP changed": (FACTORED, nudge("model.layers.0.mlp.down_proj.weight", 0.02), UNTOUCHED),
    "a key bias forgotten": (SMALL, filled(f"{FIRST}.k_proj.bias", 0), FUNCTIONS),
    "a value bias forgotten": (SMALL, filled(f"{FIRST}.v_proj.bias", 0), FUNCTIONS),
    "normalised keys absorbed": (("olmo2", 3, "factor"), scale(f"{FIRST}.q_proj.weight", 1.01), UNTOUCHED),
    "normalised keys not the mean": (("olmo2", 3, "factor"), scale(f"{FIRST}.k_proj.weight", 1.01), MERGED),
    "Conv1D keys and values exchanged": (CONV1D, exchange(f"{GPT2}.c_attn.weight", 13, 16, 8, 1), FUNCTIONS),
    "Conv1D outputs exchanged": (CONV1D, exchange(f"{GPT2}.c_proj.weight", 2, 3, 8), FUNCTIONS),
    "an output bias changed": (CONV1D, scale(f"{GPT2}.c_proj.bias"), UNTOUCHED),
    "fused heads left as they lay": (("gpt_neox", 4, "factor"), exchange(NEOX, 1, 12, 8), FUNCTIONS),
    "cross-attention's outputs exchanged": (("t5", 3, "factor"), exchange(f"{T5}.o.weight", 0, 4, 16, 1), FUNCTIONS),
    "falcon's fused values scaled": (("falcon", 3, "factor"), scale(FALCON, 1.05, 15 * 8, 18 * 8), FUNCTIONS),
    "a group of GQA exchanged": (GROUPED, exchange(f"{FIRST}.q_proj.weight", 0, 3, 8), FUNCTIONS),
    "bf16, a tenth": (("llama", 4, "factor"), scale(f"{FIRST}.v_proj.weight", 1.1, 0, 8), FUNCTIONS),
    "rewritten, outputs exchanged": (BIASED, exchange(f"{FIRST}.dense.weight", 0, 1, 8, 1), FUNCTIONS),
    "no errors claimed": (FACTORED, claims(merge_error=None), FUNCTIONS),
    "one error claimed": (FACTORED, claims(merge_error={f"{STEM}.keys": 0.5}), FUNCTIONS),
    "another error claimed": (FACTORED, claim_errors(lambda errors: {VALUES: errors[VALUES] + 1e-4}), FUNCTIONS),
    "an error that is no number claimed": (FACTORED, claim_errors(lambda _: {VALUES: math.nan}), FUNCTIONS),
    "an error of another layer claimed": (FACTORED, claim_errors(lambda _: {f"{OTHER}.keys": 0.0}), FUNCTIONS),
    "the mean claimed": (FACTORED, claims(method="mean"), UNTOUCHED | MERGED),
    "fit claimed": (FACTORED, claims(method="fit"), CLAIMS),
    "an order with a head twice": (FACTORED, claims(head_order={STEM: [0, 0, *range(2, 12)]}), FUNCTIONS),
    "an order with a head too few": (FACTORED, claims(head_order={STEM: list(range(11))}), FUNCTIONS),
    "a number for an order": (FACTORED, claims(head_order={STEM: 5}), FUNCTIONS),
}
"""By name: the arguments of `made`, where "encoder" converts it too; the damage; the checks that fail."""


def damaged(made: Made, row: tuple[Any, ...], damage: Damage, folder: Path) -> tuple[Path, Path]:
    """A damaged copy of a result, and SOURCE."""
    good, source = made(*row[:2], encoder=True) if row[2:] == ("encoder",) else made(*row)
    out = shutil.copytree(good, folder / "out")
    damage(out, source)
    return out, source


def claim_what_is_true(out: Path, source: Path) -> None:
    """Let the provenance claim the errors that the damaged tensors have: the claims alone must not save them."""
    claimed = json.loads((out / "gqa_conversion.json").read_text())
    with read_inputs(out, source, None, lambda _: None) as inputs:
        result, _ = read_result(inputs, Weights(out), claimed)
        for module in result.geometry.modules:
            order = read_orders(claimed, result.geometry).get(module.name)
            for part, losses in module_losses(result, module, order, ()).items():
                claimed["merge_error"][f"{module.name}.{part}"], _ = relative_error(losses)
    (out / "gqa_conversion.json").write_text(json.dumps(claimed))


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found(made: Made, tmp_path: Path, name: str) -> None:
    row, damage, checks = DAMAGE[name]
    out, source = damaged(made, row, damage, tmp_path)
    report = verify_checkpoint(out, source, logits=False)
    assert set(failed(report)) == checks
    assert all("\n" not in check.detail for check in report.checks)
    if row == FACTORED and checks == FUNCTIONS and "claimed" not in name and "order" not in name:
        claim_what_is_true(out, source)
        found = failed(verify_checkpoint(out, source, logits=False))
        assert set(found) == checks
        assert "claims" not in found["attention functions"]


@pytest.mark.parametrize(
    "name", ["gain not in the queries", "gain of the neutral norm", "rotary base", "query heads swapped"]
)
def test_what_the_models_compute_shows_it_too(made: Made, tmp_path: Path, name: str) -> None:
    row, damage, checks = DAMAGE[name]
    found = set(failed(verify_checkpoint(*damaged(made, row, damage, tmp_path))))
    assert checks | {"logits"} <= found <= checks | {"logits", "cached decoding"}


def test_what_changes_no_function_passes(made: Made, tmp_path: Path) -> None:
    """Another basis of values and outputs, and a turn of rotary pairs: the same layer in other numbers."""
    basis = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))).Q

    def rebase(tensor: torch.Tensor) -> torch.Tensor:
        return (basis @ tensor.unflatten(0, (-1, WIDTH))).flatten(0, 1)

    def change_all(out: Path, source: Path) -> None:
        edit(out, f"{STEM}.v_proj.weight", rebase)
        edit(out, f"{STEM}.o_proj.weight", lambda tensor: rebase(tensor.T).T.contiguous())
        turned(2, WIDTH // 2)(out, source)

    assert failed(verify_checkpoint(*damaged(made, FACTORED, change_all, tmp_path))) == {}


def test_a_mean_is_off_by_half_a_unit_at_most(made: Made, tmp_path: Path) -> None:
    """Keys that absorb nothing are rounded means. One number, whose mean lies nearest to the middle between two, becomes the
    other of the two, which is wrong by hardly more than half a unit.
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


# Results of fit
# ---------------------------------------------------------------------------------------------------------


def test_a_fit_that_is_worse_than_the_mean_fails(made: Made, tmp_path: Path) -> None:
    def worsen(out: Path, _: Path) -> None:
        for stem in (STEM, FIRST):
            edit(out, f"{stem}.o_proj.weight", lambda tensor: -3 * tensor)

    out, source = damaged(made, ("qwen2", 3, "fit"), worsen, tmp_path)
    assert set(failed(verify_checkpoint(out, source))) == {"better than mean", "module outputs"}


def test_one_bad_module_does_not_hide_in_a_good_fit(made: Made, tmp_path: Path) -> None:
    """The predictions stay nearer to SOURCE's than those of mean pooling."""

    def exchange_heads(out: Path, source: Path) -> None:
        for name, axis in (("k_proj", 0), ("v_proj", 0), ("o_proj", 1)):
            exchange(f"{STEM}.{name}.weight", 0, 1, WIDTH, axis)(out, source)

    out, source = damaged(made, ("llama, float32", 3, "fit"), exchange_heads, tmp_path)
    assert set(failed(verify_checkpoint(out, source))) == {"module outputs"}


@pytest.mark.parametrize("row", [SMALL, ("neox", 3, "fit")])
def test_one_bit_of_what_can_t_be_recomputed(made: Made, tmp_path: Path, row: tuple[Any, ...]) -> None:
    """No other check sees it; the hash that was recorded does."""
    out, source = damaged(made, row, lambda *_: None, tmp_path)
    record = (out / "gqa_conversion.json").read_text()
    edit(out, f"{STEM}.{'dense' if row[0] == 'neox' else 'o_proj'}.weight", flip(0))
    (out / "gqa_conversion.json").write_text(record)
    found = failed(verify_checkpoint(out, source, logits=False))
    assert set(found) == {"hashes"}
    assert "it has changed since it was written" in found["hashes"]


def test_heads_with_alibi_may_not_change_places(made: Made, tmp_path: Path) -> None:
    """A result of SOURCE with its heads in another order, which OUT claims: all tensors fit, and the slopes do not."""
    _, source = made("mpt", 4)
    other = shutil.copytree(source, tmp_path / "other")
    order = [5, 0, 7, 2, 9, 4, 11, 6, 1, 8, 3, 10]
    modules = [f"transformer.blocks.{layer}.attn" for layer in (0, 1)]
    for module in modules:
        edit(other, f"{module}.Wqkv.weight", lambda t: t.unflatten(0, (3, 12, -1))[:, order].flatten(0, 2).contiguous())
        edit(other, f"{module}.out_proj.weight", lambda t: t.unflatten(1, (12, -1))[:, order].flatten(1).contiguous())
    out = tmp_path / "out"
    convert_checkpoint(other, out, 4, ConversionOptions(method="factor", native=False))
    claim(out, head_order=dict.fromkeys(modules, order))
    assert failed(verify_checkpoint(out, source, logits=False)) == {}
    assert set(failed(verify_checkpoint(out, source))) == {"head order"}


# The measures, against sums over everything
# ---------------------------------------------------------------------------------------------------------


def random_heads(kv_heads: int, seed: int) -> Heads:
    """Twelve query heads and outputs that read some K/V heads."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"query": (12, 6, 9), "key": (kv_heads, 6, 8), "value": (kv_heads, 5, 8), "output": (12, 5, 7)}
    return {role: torch.randn(shape, generator=generator, dtype=torch.float64) for role, shape in shapes.items()}  # type: ignore[misc]


@pytest.mark.parametrize("rotary", [([], []), ([0, 1, 2], [3, 4, 5]), ([0, 2], [1, 3])])
def test_the_measures_are_those_of_whole_products(rotary: tuple[list[int], list[int]]) -> None:
    """Scores at all distances on average, which distances that are no multiple of each other sample."""
    pairs = torch.tensor(rotary, dtype=torch.long)
    source, merged = random_heads(4, 0), random_heads(1, 1)
    lost = total = 0.0
    steps = 64
    for step in range(steps):
        angle = 2 * math.pi * step * torch.tensor([1.0, 3.0, 7.0], dtype=torch.float64)[: pairs.shape[1]] / steps
        for query in range(12):
            one, other = (
                each["query"][query].T @ turn(each["key"][query * len(each["key"]) // 12], pairs, angle)
                for each in (source, merged)
            )
            lost += float((one - other).square().sum())
            total += float(one.square().sum())
    theirs, ours = (group_products(heads, 4, pairs) for heads in (source, merged))
    limits = torch.finfo(torch.float32)
    errors = {}
    for part in theirs:
        losses = [compare_products(*each, limits) for each in zip(theirs[part], ours[part], strict=True)]
        errors[part], _ = relative_error(torch.stack(losses).sum(0))
    assert errors["keys"] == pytest.approx((lost / total) ** 0.5, rel=1e-9)
    one, other = (
        torch.einsum("hwD,hwe->hDe", each["output"], each["value"].repeat_interleave(12 // len(each["value"]), 0))
        for each in (source, merged)
    )
    assert errors["values"] == pytest.approx(float((one - other).norm() / one.norm()), rel=1e-9)
