"""Distributes a budget of K/V cache over the layers: exact optimisation over their numbers of K/V heads."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """What each number of K/V heads would cost in one layer.

    Attributes:
        head_bytes: bytes per token of one K/V head.
        by_groups: the cost of each possible number of heads; 0 or more, or infinite.
    """

    head_bytes: int
    by_groups: Mapping[int, float]


def least_sum(layers: Sequence[LayerCosts], limit: int) -> tuple[int, ...]:
    """The number of heads of each layer that together cost least, by dynamic programming over the bytes taken.

    Args:
        layers: the costs of each layer.
        limit: bytes per token that all layers may take together.

    Raises:
        ValueError: not even the smallest numbers stay within the limit.
    """
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for layer in layers:
        reached: dict[int, tuple[float, tuple[int, ...]]] = {}
        for taken, (cost, counts) in best.items():
            for groups, added in layer.by_groups.items():
                total = taken + groups * layer.head_bytes
                if total <= limit and (total not in reached or cost + added < reached[total][0]):
                    reached[total] = (cost + added, (*counts, groups))
        best = reached
    if not best:
        raise ValueError(f"{limit} bytes do not suffice for {len(layers)} layers")
    return min(best.items(), key=lambda item: (item[1][0], item[0]))[1][1]


def least_sum_of_roots(layers: Sequence[LayerCosts], limit: int) -> tuple[int, ...]:
    """The same for the square roots of the costs, under which one large cost is better than several small ones.

    A divergence is quadratic in a small change of the logits. Where the changes that layers make are independent, their
    divergences add up; where they point the same way, their sizes do, which are the roots.

    Raises:
        ValueError: not even the smallest numbers stay within the limit.
    """
    roots = [
        replace(layer, by_groups={groups: math.sqrt(cost) for groups, cost in layer.by_groups.items()})
        for layer in layers
    ]
    return least_sum(roots, limit)


def largest_uniform(layers: Sequence[LayerCosts], limit: int) -> tuple[int, ...]:
    """The largest number of heads that is possible in all layers and stays within the limit, once for each layer.

    Raises:
        ValueError: there is none.
    """
    common = set(layers[0].by_groups).intersection(*(layer.by_groups for layer in layers[1:]))
    together = sum(layer.head_bytes for layer in layers)
    return (max(groups for groups in common if groups * together <= limit),) * len(layers)


def exchanges(layers: Sequence[LayerCosts], counts: Sequence[int], limit: int) -> list[tuple[int, ...]]:
    """The numbers that differ from given ones by more heads in one layer, and by fewer in another one or in none.

    Args:
        layers: the costs of each layer.
        counts: the given numbers.
        limit: bytes per token that all layers may take together.

    Returns:
        The numbers of each layer that stay within the limit, those with the least sum of costs first.
    """
    left = limit - sum(groups * layer.head_bytes for layer, groups in zip(layers, counts, strict=True))
    changes = [
        (place, groups, (groups - now) * layer.head_bytes, layer.by_groups[groups] - layer.by_groups[now])
        for place, (layer, now) in enumerate(zip(layers, counts, strict=True))
        for groups in layer.by_groups
        if groups != now
    ]
    found: list[tuple[float, tuple[int, ...]]] = []
    for raised, more, taken, saved in changes:
        if taken < 0:
            continue
        if taken <= left:
            found.append((saved, _replaced(counts, {raised: more})))
        found += [
            (saved + cost, _replaced(counts, {raised: more, lowered: fewer}))
            for lowered, fewer, freed, cost in changes
            if lowered != raised and freed < 0 and taken + freed <= left
        ]
    return [each for _, each in sorted(found)]


def _replaced(counts: Sequence[int], new: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(new.get(place, groups) for place, groups in enumerate(counts))
