"""Which K/V heads may change places, and which become neighbours before they merge.

Whole K/V heads move with all that reads them: that leaves a model as it is, unless something else knows heads by their
numbers.
"""

import copy
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.fit.records import recorded_order
from gqa_convert.families.geometry import AttentionFinder, AttentionLayer
from gqa_convert.families.table import FAMILIES
from gqa_convert.merging.absorption_limits import AbsorptionLimits, find_absorption_limits
from gqa_convert.merging.attention_heads import Heads, LayerLayout
from gqa_convert.merging.head_grouping import (
    find_head_order,
    group_heads,
    pair_losses,
    reorder_heads,
    rotary_pair_losses,
)
from gqa_convert.merging.merge_layer import Moments
from tests.helpers import elsewhere
from tests.helpers.fitting import EXACT as FITTED
from tests.helpers.fitting import fitted
from tests.helpers.folding_cases import CASES, EXACT, Case, build, converted, names, placed, tie
from tests.helpers.native import distance

pytestmark = pytest.mark.usefixtures("modeling_files_registered")

Array = npt.NDArray[Any]

BARRED = names(
    """
    afmoe beam bitnet bloom flex_olmo flint gemma3n_text gpt_oss granite_swa granitemoe_swa minimax_m2 mpt olmo2 olmo3 olmo_hybrid olmoe
    qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp_text
    """
)
"""Types with slopes, sinks, gates or gains by the number of a query head, or with keys that several layers share."""
BARRED_IF = {"cohere": "use_qk_norm", "falcon": "alibi", "lfm3": "use_attention_gate", "stablelm": "qk_layernorm"}
BIASED = names("t5 mt5 umt5 longt5 switch_transformers")
"""Types with a position bias by the number of a head, in self-attention only."""
SHUFFLED = ("llama", "qwen2", "gpt2", "gpt2, cross-attention", "gpt_neox", "codegen", "phi3", "bart")


def read_layers(case: Case, folder: Path) -> list[tuple[AttentionLayer, LayerLayout, AbsorptionLimits]]:
    finder = AttentionFinder(open_checkpoint(case.save(folder)), FAMILIES[case.model_type], encoder=case.encoder)
    return [(layer, LayerLayout(finder, layer), find_absorption_limits(finder, layer)) for layer in finder.layers]


@torch.no_grad()
def move(case: Case, parts: LayerLayout, order: Array) -> None:
    """Put the heads of a layer of the model in another order."""
    found = case.model.state_dict()
    homes = {
        name: next(key for key in found if key.endswith(name.partition(".")[2])) for name in parts.names
    }  # files shorten prefixes
    tensors = {name: found[home].numpy().copy() for name, home in homes.items()}
    for name, array in parts.merge_heads(reorder_heads(parts.split_heads(tensors), order), tensors, len(order)).items():
        found[homes[name]].copy_(torch.from_numpy(array))


def shuffled(layer: AttentionLayer) -> Array:
    """An order of all heads in which none stays where it was."""
    return (
        np.roll(np.random.default_rng(0).permutation(layer.kv_heads), 1)
        if layer.kv_heads > 6
        else np.roll(np.arange(layer.kv_heads), 1)
    )


def barred(case: Case, module: str) -> bool:
    """Whether heads are to stay, as read out of transformers."""
    kind = case.model_type
    if kind in BIASED:
        return module.endswith("SelfAttention")
    if kind == "whisper":
        return module.endswith("encoder_attn")
    return kind in BARRED or bool(kind in BARRED_IF and getattr(case.model.config, BARRED_IF[kind]))


@pytest.mark.parametrize("name", sorted(CASES))
def test_heads_change_places_where_nothing_is_in_the_way_and_there_only(name: str, tmp_path: Path) -> None:
    case = build(name)
    other = copy.deepcopy(case)
    expected, stuck = case.logits(), 0
    for layer, parts, constraints in read_layers(case, tmp_path):
        assert (constraints.order_constraint is not None) == barred(case, layer.module)
        stuck += constraints.order_constraint is not None
        move(other if constraints.order_constraint else case, parts, shuffled(layer))
    assert distance(case.logits(), expected) < EXACT
    if stuck and case.model_type != "whisper":
        assert distance(other.logits(), expected) > 0.01


def test_timestamps_of_whisper_hang_on_numbers_of_heads(tmp_path: Path) -> None:
    """Logits stay, but the heads that a generation config names as aligned to time are others."""
    case = build("whisper")
    case.model.set_attn_implementation("eager")
    expected, seen = case.logits(), elsewhere.attentions(case.model)["cross"]
    for layer, parts, constraints in read_layers(case, tmp_path):
        if constraints.order_constraint:
            move(case, parts, shuffled(layer))
    assert distance(case.logits(), expected) < EXACT
    assert (elsewhere.attentions(case.model)["cross"] - seen).abs().max() > 0.001


@pytest.mark.parametrize(("name", "free", "heads"), [("t5", False, 12), ("bart", True, 8), ("whisper", True, 6)])
def test_encoder(name: str, free: bool, heads: int, tmp_path: Path) -> None:
    case = build(name)
    case.encoder = True
    expected = case.logits()
    for layer, parts, constraints in read_layers(case, tmp_path):
        if layer.attention_kind == "encoder":
            assert (constraints.order_constraint is None, layer.kv_heads) == (free, heads)
            move(case, parts, shuffled(layer))
    assert (distance(case.logits(), expected) < EXACT) == free


def scatter(case: Case, folder: Path, groups: int) -> dict[str, set[frozenset[int]]]:
    """Tie heads, and spread those of a group over all groups wherever heads may change places; which ones belong
    together.
    """
    tie(case, groups)
    found = {}
    for layer, parts, constraints in read_layers(case, folder):
        if constraints.order_constraint:
            continue
        size = layer.kv_heads // groups
        order = np.arange(layer.kv_heads).reshape(groups, size).T.reshape(-1)
        move(case, parts, order)
        found[layer.module] = {frozenset(np.flatnonzero(order // size == group).tolist()) for group in range(groups)}
    return found


def grouped(order: list[int], groups: int) -> set[frozenset[int]]:
    size = len(order) // groups
    return {frozenset(order[first : first + size]) for first in range(0, len(order), size)}


@pytest.mark.parametrize(
    ("name", "kv_heads", "groups"),
    [*((name, 12, (3, 4)[len(name) % 2]) for name in SHUFFLED), ("llama", 6, 3), ("qwen2", 6, 2)],
)
def test_scattered_heads_find_one_another(name: str, kv_heads: int, groups: int, tmp_path: Path) -> None:
    """From the weights alone; the record tells which heads of the source became one."""
    case = build(name, **({} if kv_heads == 12 else {"kv_heads": kv_heads}))
    together = scatter(case, tmp_path / "heads", groups)
    expected = case.logits()
    result = converted(case, tmp_path, groups, "factor")
    assert distance(case.logits(result), expected) < EXACT
    record = json.loads((tmp_path / f"factor-{groups}" / "gqa_conversion.json").read_text())
    assert {module: grouped(order, groups) for module, order in record["head_order"].items()} == together
    assert distance(case.logits(placed(case, result, groups)), expected) < EXACT


@pytest.mark.parametrize(
    ("name", "kv_heads"), [("llama", 12), ("qwen2", 12), ("gpt2", 12), ("gpt_neox", 12), ("llama", 6)]
)
def test_scattered_heads_find_one_another_in_text(name: str, kv_heads: int, tmp_path: Path) -> None:
    """By moments of what is read, layer after layer."""
    case = build(name, **({} if kv_heads == 12 else {"kv_heads": kv_heads}))
    together = scatter(case, tmp_path / "heads", 3)
    expected = case.logits()
    records = fitted(case.save(tmp_path / "source"), tmp_path / "out", method="factor")
    assert {record.module: grouped(record.head_order, 3) for record in records} == together
    assert distance(case.logits(case.load(tmp_path / "out")), expected) < FITTED
    assert fitted(tmp_path / "source", tmp_path / "again", method="factor") == records
    further = fitted(tmp_path / "source", tmp_path / "fit", steps=4)
    assert [record.head_order for record in further] == [record.head_order for record in records]
    assert distance(case.logits(case.load(tmp_path / "fit")), expected) < FITTED


def test_heads_that_fit_stay(tmp_path: Path) -> None:
    case = build("llama")
    tie(case, 3)
    converted(case, tmp_path, 3, "factor")
    assert json.loads((tmp_path / "factor-3" / "gqa_conversion.json").read_text())["head_order"] == {}
    for layer, parts, constraints in read_layers(case, tmp_path / "source"):
        heads = parts.split_heads(
            {name: array.numpy() for name, array in case.model.state_dict().items() if name in parts.names}
        )
        assert recorded_order(find_head_order(heads, 3, constraints, None)) is None
        for reasons in (("x", None, None), (None, "x", None), (None, None, "x")):
            assert (
                find_head_order(heads, 4, AbsorptionLimits(constraints.pairs, *reasons), None)
                == np.arange(layer.kv_heads)
            ).all()
        assert (find_head_order(heads, 1, constraints, None) == np.arange(layer.kv_heads)).all()


def test_order_ignores_scales_of_parts() -> None:
    """Keys and values count by what they lose of themselves, whatever the units of either."""
    rng = np.random.default_rng(1)
    heads = Heads(
        rng.normal(size=(8, 2, 6, 10)),
        rng.normal(size=(8, 6, 10)),
        rng.normal(size=(8, 4, 10)),
        rng.normal(size=(8, 2, 7, 4)),
        None,
    )
    moment = rng.normal(size=(10, 40))
    moment = moment @ moment.T / 40
    scaled = Heads(heads.queries, 1e3 * heads.keys, 1e-3 * heads.values, heads.outputs, None)
    for moments in (None, Moments(moment, moment)):
        constraints = AbsorptionLimits((np.arange(2), np.arange(2, 4)))
        order = find_head_order(heads, 4, constraints, moments)
        assert sorted(order) == list(range(8))
        assert recorded_order(order)
        assert (order == find_head_order(scaled, 4, constraints, moments)).all()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def positive(rng: np.random.Generator, *shape: int) -> Array:
    root = rng.normal(size=(*shape, shape[-1] + 3))
    return np.asarray(root @ np.swapaxes(root, -1, -2))


def test_pair_losses_are_what_a_truncated_decomposition_drops(rng: np.random.Generator) -> None:
    rows, weights, covariance = rng.normal(size=(4, 5, 9)), positive(rng, 4, 5), positive(rng, 9)
    for seen, measured in ((np.eye(9), None), (np.linalg.cholesky(covariance), covariance)):
        losses, power = pair_losses(rows, weights, measured)
        weighed = [np.linalg.cholesky(weight).T @ head @ seen for weight, head in zip(weights, rows, strict=True)]
        for one, other in itertools.combinations(range(4), 2):
            dropped = np.linalg.svd(np.concatenate([weighed[one], weighed[other]]), compute_uv=False)[5:]
            assert np.isclose(losses[one, other], np.sum(dropped**2))
            assert losses[one, other] == losses[other, one]
        assert np.isclose(power, sum(np.sum(head**2) for head in weighed))
        assert not np.diagonal(losses).any()


def test_rotary_pair_losses_are_what_each_frequency_drops(rng: np.random.Generator) -> None:
    keys = rng.normal(size=(4, 3, 9)) + 1j * rng.normal(size=(4, 3, 9))
    powers, covariance = rng.uniform(1, 2, size=(4, 3)), positive(rng, 9)
    for seen, measured in ((np.eye(9), None), (np.linalg.cholesky(covariance), covariance)):
        losses, power = rotary_pair_losses(keys, powers, measured)
        weighed = np.sqrt(powers)[:, :, None] * (keys @ seen)
        for one, other in itertools.combinations(range(4), 2):
            dropped = [np.linalg.svd(weighed[[one, other], pair], compute_uv=False)[1] ** 2 for pair in range(3)]
            assert np.isclose(losses[one, other], sum(dropped))
            assert np.isclose(losses[one, other], losses[other, one])
        assert np.isclose(power, np.sum(np.abs(weighed) ** 2))
        assert not np.diagonal(losses).any()


def partitions(heads: frozenset[int], size: int) -> Iterator[list[tuple[int, ...]]]:
    if not heads:
        yield []
        return
    first = min(heads)
    for rest in itertools.combinations(sorted(heads - {first}), size - 1):
        for others in partitions(heads - {first, *rest}, size):
            yield [(first, *rest), *others]


@pytest.mark.parametrize("groups", [2, 3, 4])
def test_groups_lose_little(groups: int, rng: np.random.Generator) -> None:
    """Never more than neighbours do, and seldom more than the best of all partitions of 8 or 9 heads."""
    heads = 9 if groups == 3 else 8
    size, ratios = heads // groups, []
    for _ in range(20):
        losses = rng.uniform(1, 2, size=(heads, heads))
        losses = losses + losses.T
        np.fill_diagonal(losses, 0)

        def lost(partition: list[tuple[int, ...]], losses: Array = losses) -> float:
            return float(sum(losses[np.ix_(group, group)].sum() for group in partition))

        order = group_heads(losses, groups)
        found = [tuple(group) for group in order.reshape(groups, size).tolist()]
        assert sorted(order) == list(range(heads))
        assert found == sorted(tuple(sorted(group)) for group in found)
        assert (order == group_heads(losses.copy(), groups)).all()
        assert lost(found) <= lost([tuple(range(first, first + size)) for first in range(0, heads, size)])
        ratios.append(lost(found) / min(map(lost, partitions(frozenset(range(heads)), size))))
    assert np.mean(ratios) < 1.02


@pytest.mark.parametrize(("heads", "groups"), [(12, 3), (12, 4), (32, 8), (64, 8)])
def test_planted_groups_are_found(heads: int, groups: int, rng: np.random.Generator) -> None:
    labels = rng.permutation(np.arange(heads) % groups)
    losses = np.where(labels[:, None] == labels, 1.0, 3.0) + rng.uniform(0, 1, size=(heads, heads))
    losses = losses + losses.T
    np.fill_diagonal(losses, 0)
    assert all(len(set(labels[group])) == 1 for group in group_heads(losses, groups).reshape(groups, -1))
    members = np.arange(heads) // (heads // groups)
    assert (group_heads(np.where(members[:, None] == members, 1.0, 2.0), groups) == np.arange(heads)).all()
    assert (group_heads(np.ones((heads, heads)), groups) == np.arange(heads)).all()


@pytest.mark.parametrize("scale", [1.0, 1e-17])
def test_losses_that_are_not_symmetric_are_grouped_too(scale: float, rng: np.random.Generator) -> None:
    """As the rounding of heads that are all alike leaves them; swaps that seem to gain went round in circles."""
    for _ in range(20):
        losses = scale * rng.uniform(0, 1, size=(12, 12))
        order = group_heads(losses, 3)
        assert sorted(order) == list(range(12))
        assert (order == group_heads(losses + losses.T, 3)).all()


def test_losses_of_rotary_keys_are_symmetric_to_the_last_bit(rng: np.random.Generator) -> None:
    keys = rng.normal(size=(12, 4, 9)) + 1j * rng.normal(size=(12, 4, 9))
    alike = np.broadcast_to(keys[:1], keys.shape)
    for given in (keys, alike):
        losses, _ = rotary_pair_losses(given, rng.uniform(1, 2, size=(12, 4)))
        assert (losses == losses.T).all()
