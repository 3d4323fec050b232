"""Which heads become neighbours before they merge: losses of pairs, and the search for groups."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gqa_convert.merging.absorption_limits import AbsorptionLimits
from gqa_convert.merging.factorisation import Channels
from gqa_convert.merging.head_grouping import (
    find_head_order,
    group_heads,
    pair_losses,
    reorder_heads,
)
from gqa_convert.merging.merge_layer import Moments, merge_layer
from tests.helpers.random_heads import random_heads, reconstruction_errors

Array = np.ndarray[Any, Any]


def positive(rng: np.random.Generator, *shape: int) -> Array:
    root = rng.normal(size=(*shape, shape[-1] + 3))
    return np.asarray(root @ root.swapaxes(-1, -2))


@pytest.mark.parametrize("measured", [False, True])
def test_pair_losses_are_what_a_truncated_decomposition_drops(
    rng: np.random.Generator, measured: bool
) -> None:
    rows, covariance = rng.normal(size=(4, 5, 9)), positive(rng, 9)
    seen = np.linalg.cholesky(covariance) if measured else np.eye(9)
    readers = rng.normal(size=(4, 2, 5, 7))
    losses, power = pair_losses(Channels(rows, readers, covariance if measured else None, None))
    weights = np.einsum("hrce,hrde->hcd", readers, readers)
    weighted = np.linalg.cholesky(weights).swapaxes(1, 2) @ rows @ seen
    for one, other in itertools.permutations(range(4), 2):
        dropped = np.linalg.svd(np.concatenate([weighted[one], weighted[other]]), compute_uv=False)[
            5:
        ]
        assert losses[one, other] == pytest.approx(np.sum(dropped**2))
    assert power == pytest.approx(np.sum(weighted**2))
    assert not np.diagonal(losses).any()


def partitions(heads: frozenset[int], size: int) -> Iterator[list[tuple[int, ...]]]:
    if not heads:
        yield []
        return
    first = min(heads)
    for rest in itertools.combinations(sorted(heads - {first}), size - 1):
        for others in partitions(heads - {first, *rest}, size):
            yield [(first, *rest), *others]


def loss_of(partition: list[tuple[int, ...]], losses: Array) -> float:
    return float(sum(losses[np.ix_(group, group)].sum() for group in partition))


@pytest.mark.parametrize("groups", [2, 3, 4])
def test_groups_lose_little(groups: int, rng: np.random.Generator) -> None:
    """Never more than neighbours do, and seldom more than the best of all partitions of 8 or 9
    heads.
    """
    heads = 9 if groups == 3 else 8
    size, ratios = heads // groups, []
    neighbours = [tuple(range(first, first + size)) for first in range(0, heads, size)]
    for _ in range(20):
        losses = rng.uniform(1, 2, size=(heads, heads))
        losses = (losses + losses.T) * (1 - np.eye(heads))
        order = group_heads(losses, groups)
        found = [tuple(group) for group in order.reshape(groups, size).tolist()]
        assert sorted(order) == list(range(heads))
        assert found == sorted(tuple(sorted(group)) for group in found)
        assert loss_of(found, losses) <= loss_of(neighbours, losses)
        best = min(
            loss_of(partition, losses) for partition in partitions(frozenset(range(heads)), size)
        )
        ratios.append(loss_of(found, losses) / best)
    assert np.mean(ratios) < 1.003


@pytest.mark.parametrize("scale", [1.0, 1e-17])
def test_losses_that_are_not_symmetric_are_grouped_too(
    scale: float, rng: np.random.Generator
) -> None:
    """As the rounding of heads that are all alike leaves them: swaps that seem to gain must not
    go round in circles.
    """
    for _ in range(20):
        losses = scale * rng.uniform(0, 1, size=(12, 12))
        order = group_heads(losses, 3)
        assert sorted(order) == list(range(12))
        assert np.array_equal(order, group_heads(losses + losses.T, 3))
    assert np.array_equal(group_heads(np.full((12, 12), scale), 3), np.arange(12)), "nothing is won"


LIMITS = AbsorptionLimits(np.array([[0, 1], [2, 3]]))
SIZES = {"head_dim": 6, "value_dim": 4, "inputs": 10, "outputs": 7}


@pytest.mark.parametrize("seed", range(12))
def test_pairs_of_heads_lose_what_their_merge_loses(seed: int) -> None:
    """Of all ways to make two pairs of four heads, the order is that of the least error."""
    rng = np.random.default_rng(seed)
    heads = random_heads(rng, 4, 2, **SIZES)
    moments = Moments(positive(rng, 10), positive(rng, 10))
    errors = {}
    for order in ((0, 1, 2, 3), (0, 2, 1, 3), (0, 3, 1, 2)):
        moved = reorder_heads(heads, np.array(order))
        of_scores, of_values = reconstruction_errors(
            moved, merge_layer(moved, 2, LIMITS, moments), LIMITS, moments
        )
        errors[order] = of_scores**2 + of_values**2
    assert tuple(find_head_order(heads, 2, LIMITS, moments)) == min(errors, key=errors.__getitem__)


def test_heads_keep_their_order_where_something_is_averaged_or_nothing_is_chosen(
    rng: np.random.Generator,
) -> None:
    heads = random_heads(rng, 8, 2, **SIZES)
    for limit in ("key_constraint", "value_constraint", "order_constraint"):
        limits = replace(LIMITS, **{limit: "a norm"})
        assert np.array_equal(find_head_order(heads, 4, limits, Moments()), np.arange(8))
    assert np.array_equal(find_head_order(heads, 1, LIMITS, Moments()), np.arange(8))
    assert np.array_equal(find_head_order(heads, 8, LIMITS, Moments()), np.arange(8))
