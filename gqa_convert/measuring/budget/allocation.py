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
