"""The verifier on methods whose maps queries and outputs absorb: good conversions pass, and whatever only claims to be
one fails.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from gqa_convert.conversion.options import CalibrationOptions, ConversionOptions
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.families.rotary import rotary_pairs
from gqa_convert.families.table import FAMILIES
from gqa_convert.verify import verify_checkpoint
from gqa_convert.verify.geometry import Heads
from gqa_convert.verify.inputs import read_inputs
from gqa_convert.verify.optimum import Loss, group_products, module_losses, read_orders, shared_loss
from gqa_convert.verify.result import read_result
from gqa_convert.verify.weights import Weights
from tests.helpers.own_files import SIZES as OWN_SIZES
from tests.helpers.own_files import make_source
from tests.helpers.verification import (
    Conversions,
    Damage,
    change,
    claim,
    claims,
    details,
    edit,
    edit_json,
    failed,
    save_tokenizer,
    tensor_of,
)
from tests.helpers.verify_sources import NATIVE, SIZES, TRANSLATED, save_source, save_translated

Made = Callable[..., tuple[Path, Path]]

SOURCES: dict[str, Callable[[Path], object]] = {
    **NATIVE,
    "llama, float32": lambda folder: save_source(LlamaConfig(**SIZES, num_key_value_heads=12, head_dim=12), folder),
    "qwen3": lambda folder: save_source(Qwen3Config(**SIZES, num_key_value_heads=12, head_dim=12), folder),
    "gpt2, Conv1D": lambda folder: make_source("gpt2", folder, dtype=torch.bfloat16),
    "gpt2, cross": lambda folder: make_source("gpt2", folder, n_layer=2, add_cross_attention=True),
    "own neox": lambda folder: make_source("gpt_neox", folder, rope_parameters=HALF),
    "t5": lambda folder: make_source("t5", folder, num_layers=1),
    "falcon": lambda folder: make_source("falcon", folder, bias=True),
    "codegen": lambda folder: make_source("codegen", folder),
    "mpt": lambda folder: make_source("mpt", folder),
}
HALF = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
STOCK = set(NATIVE) | {"llama, float32", "qwen3"}
"""Sources that need no choice between a rewritten source and a modelling file."""


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """(OUT, SOURCE) of a conversion, made once; treat both as read-only."""
    root = tmp_path_factory.mktemp("verify-absorbed")
    text = write_text(root / "text.txt")
    fit = {"calibration": CalibrationOptions(source=text, tokens=1000, sequence_length=30, steps=20)}

    def save(name: str, source: Path) -> None:
        if name in TRANSLATED:
            save_translated(name, source)
        else:
            SOURCES[name](source)
            save_tokenizer(source)
        edit_json(source / "tokenizer_config.json", eos_token="w2")

    conversions = Conversions(root, save)

    def make(name: str, groups: int, method: str) -> tuple[Path, Path]:
        native = None if name in STOCK else name in TRANSLATED
        return conversions(name, groups, method, native=native, **(fit if method == "fit" else {}))

    return make


def write_text(path: Path) -> Path:
    numbers = torch.randint(0, 47, (40, 60), generator=torch.Generator().manual_seed(3)).tolist()
    path.write_text("\n".join(" ".join(f"w{number}" for number in line) for line in numbers))
    return path


# Good conversions
# -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("llama, float32", 3),
        ("llama", 4),
        ("llama_one_file", 1),
        ("llama_gqa", 2),
        ("qwen2", 3),
        ("phi3", 4),
        ("olmo2", 3),
        ("qwen3", 4),
        ("cohere", 3),
        ("stablelm", 3),
        ("gpt2, Conv1D", 3),
        ("gpt2, cross", 4),
        ("own neox", 4),
        ("t5", 3),
        ("falcon", 3),
        ("codegen", 3),
    ],
)
def test_good_conversions_pass(made: Made, name: str, groups: int) -> None:
    out, source = made(name, groups, "factor")
    report = verify_checkpoint(out, source)
    assert failed(report) == {}
    found = details(report)
    assert "could lose less" in found["attention functions"]
    assert " 0 parameters" not in found["logits"]
    assert f"{groups} heads in each" in found["cache heads"]


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("neox", 3),
        ("neox, half", 4),
        ("neox, tied", 3),
        ("serial", 3),
        ("gptj, half", 3),
        ("codegen, half", 4),
        ("gpt2", 1),
        ("gpt2, half", 1),
    ],
)
def test_good_rewritten_sources_pass(made: Made, name: str, groups: int) -> None:
    out, source = made(name, groups, "factor")
    report = verify_checkpoint(out, source)
    assert failed(report) == {}
    assert "could lose less" in details(report)["attention functions"]


@pytest.mark.parametrize(("name", "groups"), [("qwen2", 3), ("neox", 3)])
def test_fitted_conversions_pass(made: Made, name: str, groups: int) -> None:
    out, source = made(name, groups, "fit")
    report = verify_checkpoint(out, source)
    assert failed(report) == {}
    found = details(report)
    assert "0." in found["module outputs"]
    assert json.loads(json.dumps(report.summary()))["passed"] is True


def test_a_fit_that_is_worse_than_the_mean_fails(made: Made, tmp_path: Path) -> None:
    _, source = made("qwen2", 3, "fit")
    out = shutil.copytree(made("qwen2", 3, "fit")[0], tmp_path / "out")
    for layer in (0, 1):
        edit(out, f"model.layers.{layer}.self_attn.o_proj.weight", lambda tensor: -3 * tensor)
    assert set(failed(verify_checkpoint(out, source))) == {"better than mean", "module outputs"}


def test_one_bad_module_does_not_hide_in_a_good_fit(made: Made, tmp_path: Path) -> None:
    """The predictions stay nearer to SOURCE's than those of mean pooling."""
    good, source = made("llama, float32", 3, "fit")
    out = shutil.copytree(good, tmp_path / "out")
    for part in ("k_proj", "v_proj"):
        rows(part, swapped)(out, source)
    columns(swapped)(out, source)
    assert set(failed(verify_checkpoint(out, source))) == {"module outputs"}


def test_heads_with_alibi_may_not_change_places(made: Made, tmp_path: Path) -> None:
    """A result of SOURCE with its heads in another order, which OUT claims: all tensors fit, and the slopes do not."""
    _, source = made("mpt", 4, "factor")
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
# ----------------------------------------------------------------------------------------


def random_heads(kv_heads: int, seed: int) -> Heads:
    """Twelve query heads and outputs that read some K/V heads."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"query": (12, 6, 9), "key": (kv_heads, 6, 8), "value": (kv_heads, 5, 8), "output": (12, 5, 7)}
    return {role: torch.randn(shape, generator=generator, dtype=torch.float64) for role, shape in shapes.items()}  # type: ignore[misc]


def turned(rows: torch.Tensor, pairs: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """Rows [c, n] as they are at an angle for each pair."""
    result = rows.clone()
    real, imaginary = rows[pairs[0]], rows[pairs[1]]
    result[pairs[0]] = angle.cos()[:, None] * real - angle.sin()[:, None] * imaginary
    result[pairs[1]] = angle.sin()[:, None] * real + angle.cos()[:, None] * imaginary
    return result


@pytest.mark.parametrize("rotary", [([], []), ([0, 1, 2], [3, 4, 5]), ([0, 2, 4], [1, 3, 5]), ([0, 2], [1, 3])])
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
                each["query"][query].T @ turned(each["key"][query * len(each["key"]) // 12], pairs, angle)
                for each in (source, merged)
            )
            lost += float((one - other).square().sum())
            total += float(one.square().sum())
    every = [0, 1, 2, 3]
    theirs, ours = group_products(source, 4, every, every, pairs), group_products(merged, 4, every, [0], pairs)
    limits = torch.finfo(torch.float64)
    losses = {
        part: sum((shared_loss(*each, limits, None) for each in zip(theirs[part], ours[part], strict=True)), Loss())
        for part in theirs
    }
    assert losses["keys"].error == pytest.approx((lost / total) ** 0.5, rel=1e-9)
    one, other = (
        torch.einsum("hwD,hwe->hDe", each["output"], each["value"].repeat_interleave(12 // len(each["value"]), 0))
        for each in (source, merged)
    )
    assert losses["values"].error == pytest.approx(float((one - other).norm() / one.norm()), rel=1e-9)


@pytest.mark.parametrize(
    "model_type",
    ["gpt_neox", "gptj", "codegen", "falcon", "phi", "stablelm", "glm", "llama", "zamba2", "mpt", "bamba"],
)
def test_rows_that_turn_are_those_of_the_models(model_type: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type](**OWN_SIZES.get(model_type, {}))
    expected = {
        "gpt_neox": 16,
        "gptj": 4,
        "codegen": 4,
        "falcon": 64,
        "phi": 32,
        "stablelm": 16,
        "glm": 32,
        "llama": 64,
        "zamba2": 0,
        "mpt": 0,
        "bamba": 32,
    }[model_type]
    config = {
        key: value
        for key, value in json.loads(config.to_json_string()).items()
        if key not in ("hidden_size", "num_attention_heads", "head_dim")
    }
    config |= {"hidden_size": 256, "num_attention_heads": 4, "mamba_n_heads": 8, "mamba_d_head": 64} | (
        {} if model_type == "falcon" else {"head_dim": 64}
    )
    assert rotary_pairs(FAMILIES[model_type], config, 64).size == expected


# What only claims to be one
# --------------------------------------------------------------------------------------------------------


STEM = "model.layers.1.self_attn"
WIDTH = 12  # of a head of "llama, float32", with 12 heads in 3 groups


def rows(part: str, change: Callable[[torch.Tensor], torch.Tensor], kind: str = "weight") -> Damage:
    """Change a projection as heads [heads, rows, ...]."""
    return lambda out, _: edit(
        out, f"{STEM}.{part}.{kind}", lambda tensor: change(tensor.unflatten(0, (-1, WIDTH))).flatten(0, 1).contiguous()
    )


def columns(change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    """The same of the output projection, [heads, columns, d]."""
    return lambda out, _: edit(
        out,
        f"{STEM}.o_proj.weight",
        lambda tensor: change(tensor.T.unflatten(0, (-1, WIDTH))).flatten(0, 1).T.contiguous(),
    )


def swapped(heads: torch.Tensor, a: int = 0, b: int = 1) -> torch.Tensor:
    order = list(range(len(heads)))
    order[a], order[b] = b, a
    return heads[order]


def negated(heads: torch.Tensor) -> torch.Tensor:
    return torch.cat([-heads[:1], heads[1:]])


def nudged(tensor: torch.Tensor) -> torch.Tensor:
    tensor[2] += 0.02 * tensor.norm() / tensor.numel() ** 0.5
    return tensor


def merged_with_mean(out: Path, source: Path, layers: tuple[int, ...] = (0, 1), parts: str = "qkvo") -> None:
    for stem in (f"model.layers.{layer}.self_attn" for layer in layers):
        for part in parts:
            theirs = tensor_of(source, f"{stem}.{part}_proj.weight")
            if part in "kv":
                theirs = theirs.unflatten(0, (3, 4, WIDTH)).mean(1).flatten(0, 1)
            edit(out, f"{stem}.{part}_proj.weight", lambda _, theirs=theirs: theirs)  # type: ignore[misc]


def wrongly_paired(out: Path, source: Path) -> None:
    """Keys and queries turned by one angle in the pairs of neighbouring rows, where rows half a head apart are
    pairs.
    """
    angle = torch.linspace(0.5, 1.5, WIDTH // 2)

    def turn(heads: torch.Tensor) -> torch.Tensor:
        a, b = heads[:, 0::2], heads[:, 1::2]
        cos, sin = angle.cos()[None, :, None], angle.sin()[None, :, None]
        return torch.stack([cos * a - sin * b, sin * a + cos * b], 2).flatten(1, 2)

    rows("q_proj", turn)(out, source)
    rows("k_proj", turn)(out, source)


def in_another_subspace(out: Path, source: Path) -> None:
    """Shared values whose rows span other vectors than the best ones, with the outputs that suit them."""
    order = json.loads((out / "gqa_conversion.json").read_text())["head_order"].get(STEM, list(range(12)))
    values = tensor_of(source, f"{STEM}.v_proj.weight").double().unflatten(0, (12, WIDTH))[order]
    outputs = tensor_of(source, f"{STEM}.o_proj.weight").double().T.unflatten(0, (12, WIDTH))[order]
    shared = tensor_of(out, f"{STEM}.v_proj.weight").double().unflatten(0, (3, WIDTH))
    noise = torch.randn(shared.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shared = shared + 0.1 * shared.std() * noise
    # a head's output O V x is replaced by the nearest one that the shared values V' allow, O V pinv(V') V' x
    maps = values @ torch.linalg.pinv(shared).repeat_interleave(4, 0)
    columns(lambda _: (maps.mT @ outputs).float())(out, source)
    rows("v_proj", lambda _: shared.float())(out, source)


FUNCTIONS = {"attention functions"}
NAN = {"merged tensors", "attention functions"}


def filled_with_nan(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.fill_(torch.nan)


def shorter(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:-WIDTH].contiguous()


DAMAGE: dict[str, tuple[Damage, set[str]]] = {
    "two key heads exchanged": (rows("k_proj", swapped), FUNCTIONS),
    "two value heads exchanged": (rows("v_proj", swapped), FUNCTIONS),
    "two query heads exchanged": (rows("q_proj", swapped), FUNCTIONS),
    "queries of two groups exchanged": (rows("q_proj", lambda heads: swapped(heads, 1, 7)), FUNCTIONS),
    "a query's sign": (rows("q_proj", negated), FUNCTIONS),
    "a value's sign": (rows("v_proj", negated), FUNCTIONS),
    "output columns of two heads exchanged": (columns(swapped), FUNCTIONS),
    "an output head's sign": (columns(negated), FUNCTIONS),
    "a query row nudged": (change(f"{STEM}.q_proj.weight", nudged), FUNCTIONS),
    "a value row nudged": (change(f"{STEM}.v_proj.weight", nudged), FUNCTIONS),
    "an output row nudged": (change(f"{STEM}.o_proj.weight", nudged), FUNCTIONS),
    "the mean": (merged_with_mean, FUNCTIONS),
    "the mean in one layer": (lambda out, source: merged_with_mean(out, source, (1,)), FUNCTIONS),
    "the mean of values": (lambda out, source: merged_with_mean(out, source, (0, 1), "vo"), FUNCTIONS),
    "the mean of keys": (lambda out, source: merged_with_mean(out, source, (0, 1), "qk"), FUNCTIONS),
    "the source's queries": (lambda out, source: merged_with_mean(out, source, (1,), "q"), FUNCTIONS),
    "the source's output": (lambda out, source: merged_with_mean(out, source, (1,), "o"), FUNCTIONS),
    "values of another subspace": (in_another_subspace, FUNCTIONS),
    "wrong rotary pairs": (wrongly_paired, FUNCTIONS),
    "NaN in a key": (change(f"{STEM}.k_proj.weight", filled_with_nan), NAN),
    "NaN in a query": (change(f"{STEM}.q_proj.weight", filled_with_nan), NAN),
    "another shape": (change(f"{STEM}.q_proj.weight", shorter), NAN | {"index"}),
    "another type": (change(f"{STEM}.o_proj.weight", torch.Tensor.double), {"merged tensors", "index"}),
    "an MLP changed": (change("model.layers.0.mlp.down_proj.weight", nudged), {"untouched tensors"}),
    "a norm changed": (change("model.layers.0.input_layernorm.weight", nudged), {"untouched tensors"}),
}


def claim_what_is_true(out: Path, source: Path) -> None:
    """Let the provenance claim the errors that the damaged tensors have: the claims alone must not save them."""
    claimed = json.loads((out / "gqa_conversion.json").read_text())
    with read_inputs(out, source, None, lambda _: None) as inputs:
        result, _ = read_result(inputs, Weights(out), claimed)
        for module in result.geometry.modules:
            order = read_orders(claimed, result.geometry).get(module.name)
            for part, loss in module_losses(result, module, order, ()).items():
                claimed["merge_error"][f"{module.name}.{part}"] = loss.error
    (out / "gqa_conversion.json").write_text(json.dumps(claimed))


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found(made: Made, tmp_path: Path, name: str) -> None:
    damage, checks = DAMAGE[name]
    out, source = made("llama, float32", 3, "factor")
    bad = shutil.copytree(out, tmp_path / "bad")
    damage(bad, source)
    assert set(failed(verify_checkpoint(bad, source, logits=False))) == checks
    if checks == FUNCTIONS:
        claim_what_is_true(bad, source)
        assert set(failed(verify_checkpoint(bad, source, logits=False))) == checks
        assert (
            "which factor does not make" in failed(verify_checkpoint(bad, source, logits=False))["attention functions"]
        )


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_a_layer_of_another_conversion_is_found(made: Made, tmp_path: Path, groups: int) -> None:
    """Three of its K/V heads, whichever are nearest."""
    out, source = made("llama, float32", 3, "factor")
    other, _ = made("llama, float32", groups, "factor")
    bad = shutil.copytree(out, tmp_path / "bad")
    for part in "qkvo":
        tensor = tensor_of(other, f"{STEM}.{part}_proj.weight")
        if part in "kv":
            tensor = tensor.unflatten(0, (groups, WIDTH))[torch.arange(3) * groups // 3].flatten(0, 1)
        edit(bad, f"{STEM}.{part}_proj.weight", lambda _, tensor=tensor: tensor)  # type: ignore[misc]
    claim_what_is_true(bad, source)
    assert set(failed(verify_checkpoint(bad, source, logits=False))) == FUNCTIONS


def test_what_changes_no_function_passes(made: Made, tmp_path: Path) -> None:
    """Another basis of values and outputs, and a turn of rotary pairs: the same layer in other numbers."""
    out, source = made("llama, float32", 3, "factor")
    same = shutil.copytree(out, tmp_path / "same")
    basis = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))).Q
    rows("v_proj", lambda heads: torch.einsum("ab,hbe->hae", basis, heads))(same, source)
    columns(lambda heads: torch.einsum("ab,hbd->had", basis, heads))(same, source)
    angle = torch.linspace(0.3, 2.0, WIDTH // 2)[:, None]

    def turn(heads: torch.Tensor) -> torch.Tensor:
        a, b = heads[:, : WIDTH // 2], heads[:, WIDTH // 2 :]
        return torch.cat([angle.cos() * a - angle.sin() * b, angle.sin() * a + angle.cos() * b], 1)

    rows("q_proj", turn)(same, source)
    rows("k_proj", turn)(same, source)
    assert failed(verify_checkpoint(same, source)) == {}


# Biases, norms, layouts and rewritten sources
# -------------------------------------------------------------------------------------------


def zero(name: str) -> Damage:
    return change(name, torch.zeros_like)


def scale(name: str, by: float = 1.05, first: int = 0, last: int | None = None, axis: int = 0) -> Damage:
    def changed(tensor: torch.Tensor) -> torch.Tensor:
        tensor.narrow(axis, first, (tensor.shape[axis] if last is None else last) - first).mul_(by)
        return tensor

    return change(name, changed)


def exchange(name: str, a: int, b: int, width: int, axis: int = 0) -> Damage:
    def changed(tensor: torch.Tensor) -> torch.Tensor:
        one, other = tensor.narrow(axis, a * width, width), tensor.narrow(axis, b * width, width)
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)
        return tensor

    return change(name, changed)


def claim_errors(change: Callable[[dict[str, float]], dict[str, float]]) -> Damage:
    def damage(out: Path, _: Path) -> None:
        errors = json.loads((out / "gqa_conversion.json").read_text())["merge_error"]
        claim(out, merge_error=errors | change(errors))

    return damage


LLAMA = "llama, float32"
VALUES, OTHER, HASHES = f"{STEM}.values", "model.layers.7.self_attn", {"hashes"}
LAYER, GPT2, NEOX, T5, FALCON = (
    "model.layers.0.self_attn",
    "transformer.h.0.attn",
    "gpt_neox.layers.0.attention",
    "decoder.block.0.layer.1.EncDecAttention",
    "transformer.h.1.self_attention",
)
MERGED, UNTOUCHED = {"merged tensors"}, {"untouched tensors"}

ELSEWHERE: dict[str, tuple[str, int, Damage, set[str]]] = {
    "a value bias forgotten": ("qwen2", 3, zero(f"{LAYER}.v_proj.bias"), FUNCTIONS),
    "a key bias forgotten": ("qwen2", 3, zero(f"{LAYER}.k_proj.bias"), FUNCTIONS),
    "a query bias forgotten": ("qwen2", 3, zero(f"{LAYER}.q_proj.bias"), FUNCTIONS),
    "normalised keys absorbed": ("olmo2", 3, scale(f"{LAYER}.q_proj.weight", 1.01), UNTOUCHED),
    "normalised keys not the mean": ("olmo2", 3, scale(f"{LAYER}.k_proj.weight", 1.01), MERGED),
    "gains not averaged": ("olmo2", 3, exchange(f"{LAYER}.k_norm.weight", 0, 1, 8), MERGED),
    "one gain per head exchanged": ("stablelm", 3, scale(f"{LAYER}.k_layernorm.norms.1.weight"), MERGED),
    "Conv1D queries exchanged": ("gpt2, Conv1D", 3, exchange(f"{GPT2}.c_attn.weight", 0, 5, 8, 1), FUNCTIONS),
    "Conv1D keys and values exchanged": ("gpt2, Conv1D", 3, exchange(f"{GPT2}.c_attn.weight", 13, 16, 8, 1), FUNCTIONS),
    "Conv1D outputs exchanged": ("gpt2, Conv1D", 3, exchange(f"{GPT2}.c_proj.weight", 2, 3, 8), FUNCTIONS),
    "Conv1D bias forgotten": ("gpt2, Conv1D", 3, zero(f"{GPT2}.c_attn.bias"), FUNCTIONS),
    "an output bias changed": ("gpt2, Conv1D", 3, scale(f"{GPT2}.c_proj.bias"), UNTOUCHED),
    "fused heads left as they lay": ("own neox", 4, exchange(f"{NEOX}.query_key_value.weight", 1, 12, 8), FUNCTIONS),
    "cross-attention's keys exchanged": ("t5", 3, exchange(f"{T5}.k.weight", 0, 2, 16), FUNCTIONS),
    "cross-attention's outputs exchanged": ("t5", 3, exchange(f"{T5}.o.weight", 0, 4, 16, 1), FUNCTIONS),
    "an encoder changed": ("t5", 3, scale("encoder.block.0.layer.0.SelfAttention.q.weight"), UNTOUCHED),
    "falcon's fused values scaled": (
        "falcon",
        3,
        scale(f"{FALCON}.query_key_value.weight", 1.05, 15 * 8, 18 * 8),
        FUNCTIONS,
    ),
    "a group of GQA exchanged": ("llama_gqa", 2, exchange(f"{LAYER}.q_proj.weight", 0, 3, 8), FUNCTIONS),
    "bf16, a query's sign": ("llama", 4, scale(f"{LAYER}.q_proj.weight", -1.0, 0, 8), FUNCTIONS),
    "bf16, a tenth": ("llama", 4, scale(f"{LAYER}.v_proj.weight", 1.1, 0, 8), FUNCTIONS),
    "rewritten, outputs exchanged": ("neox", 3, exchange(f"{LAYER}.dense.weight", 0, 1, 8, 1), FUNCTIONS),
    "rewritten, a query's sign": ("neox", 3, scale(f"{STEM}.q_proj.weight", -1.0, 0, 8), FUNCTIONS),
    "rewritten, a bias forgotten": ("neox", 3, zero(f"{STEM}.v_proj.bias"), FUNCTIONS),
    "rewritten, keys exchanged": ("codegen, half", 4, exchange(f"{STEM}.k_proj.weight", 0, 1, 8), FUNCTIONS),
    "rewritten, a bias that SOURCE has not": (
        "codegen, half",
        4,
        change(f"{STEM}.q_proj.bias", torch.ones_like),
        FUNCTIONS,
    ),
    "rewritten, an output bias": ("neox", 3, scale(f"{STEM}.dense.bias"), UNTOUCHED),
    "rewritten, unscaled queries": ("gpt2", 1, scale("transformer.h.1.attn.c_attn.weight", 2.0, 0, 96), FUNCTIONS),
    "rewritten, an MLP": ("neox", 3, scale("model.layers.1.mlp.fc2.weight"), UNTOUCHED),
    "no errors claimed": (LLAMA, 3, claims(merge_error=None), FUNCTIONS),
    "errors of nothing claimed": (LLAMA, 3, claims(merge_error={}), FUNCTIONS),
    "one error claimed": (LLAMA, 3, claims(merge_error={f"{STEM}.keys": 0.5}), FUNCTIONS),
    "another error claimed": (LLAMA, 3, claim_errors(lambda errors: {VALUES: errors[VALUES] + 1e-4}), FUNCTIONS),
    "an error that is no number claimed": (LLAMA, 3, claim_errors(lambda _: {VALUES: math.nan}), FUNCTIONS),
    "a negative error claimed": (LLAMA, 3, claim_errors(lambda _: {VALUES: -0.1}), FUNCTIONS),
    "an error of another layer claimed": (LLAMA, 3, claim_errors(lambda _: {f"{OTHER}.keys": 0.0}), FUNCTIONS),
    "the mean claimed": (LLAMA, 3, claims(method="mean"), UNTOUCHED | MERGED),
    "fit claimed": (LLAMA, 3, claims(method="fit"), {"provenance"}),
    "an order with a head twice": (LLAMA, 3, claims(head_order={STEM: [0, 0, *range(2, 12)]}), FUNCTIONS),
    "an order with a head too few": (LLAMA, 3, claims(head_order={STEM: list(range(11))}), FUNCTIONS),
    "a number for an order": (LLAMA, 3, claims(head_order={STEM: 5}), FUNCTIONS),
    "an order of another layer": (LLAMA, 3, claims(head_order={OTHER: [0]}), FUNCTIONS),
    "a list for orders": (LLAMA, 3, claims(head_order=[1]), FUNCTIONS),
    "a list for hashes": ("qwen2", 3, claims(result=[]), HASHES),
    "a number for a hash": ("qwen2", 3, claims(result={"files": [1]}), HASHES),
    "no hashes": ("qwen2", 3, claims(result={"files": {}}), HASHES),
    "a number for a file": ("qwen2", 3, claims(result={"files": {"model.safetensors": 3}}), HASHES),
    "hashes of another file": ("qwen2", 3, claims(result={"files": {"other": {"sha256": "0"}}}), HASHES),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_damage_is_found_in_other_layouts_and_in_claims(made: Made, tmp_path: Path, name: str) -> None:
    source_name, groups, damage, checks = ELSEWHERE[name]
    out, source = made(source_name, groups, "factor")
    bad = shutil.copytree(out, tmp_path / "bad")
    damage(bad, source)
    assert set(failed(verify_checkpoint(bad, source, logits=False))) == checks


@pytest.mark.parametrize("name", ["qwen2", "neox"])
@pytest.mark.parametrize("method", ["factor", "fit"])
def test_one_bit_of_what_can_t_be_recomputed(made: Made, tmp_path: Path, name: str, method: str) -> None:
    """No other check sees it; the hash that was recorded does."""
    good, source = made(name, 3, method)
    out = shutil.copytree(good, tmp_path / "out")
    record = json.loads((out / "gqa_conversion.json").read_text())["result"]["files"]
    assert set(record) == {path.name for path in out.glob("*.safetensors")}
    for file in out.glob("*.safetensors"):
        raw = bytearray(file.read_bytes())
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        if output := next(
            (entry for key, entry in header.items() if key.endswith(("o_proj.weight", "self_attn.dense.weight"))), None
        ):
            break
    assert output is not None
    raw[8 + length + output["data_offsets"][0]] ^= 1
    file.write_bytes(raw)
    found = failed(verify_checkpoint(out, source, logits=False))
    assert set(found) == {"hashes"}
    assert (
        f"{file.name} has SHA-256 {hashlib.sha256(raw).hexdigest()}, expected {record[file.name]['sha256']}"
        in found["hashes"]
    )
