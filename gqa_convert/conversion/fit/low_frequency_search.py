"""Finds the first rotary pair of a layer that is merged as if it had no positions.

Merging is linear in the rows of keys and of queries. So a trial is done with coordinates in the place of rows, and with
the Gram matrix of the rows in the place of the inputs' moment, which is computed once; only the maps that come out are
applied to the rows. Shape legend as in `gqa_convert.merging.attention_heads`, with m heads in a group.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gqa_convert.merging.absorption_limits import AbsorptionLimits
from gqa_convert.merging.attention_heads import Heads
from gqa_convert.merging.factorisation import times
from gqa_convert.merging.merge_layer import Moments, merge_layer

Array = npt.NDArray[Any]

_DENT = 2
"""The number of steps over which the error may rise before it falls further."""


class KeyTrials:
    """Merges of keys that differ in where the low-frequency pairs begin.

    Args:
        heads: of the source.
        groups: how many K/V heads remain.
        limits: what the projections can absorb; they can absorb maps of the keys.
        moments: of the inputs.
    """

    def __init__(self, heads: Heads, groups: int, limits: AbsorptionLimits, moments: Moments) -> None:
        self._heads = heads
        self._limits = replace(limits, value_constraint="values are not looked at")
        size = heads.groups // groups
        self._groups = [slice(first, first + size) for first in range(0, heads.groups, size)]
        self._moments = [
            Moments(_gram(heads.queries[own], moments.queries), _gram(heads.keys[own], moments.keys))
            for own in self._groups
        ]

    def merged(self, first_low: int) -> Heads:
        """What `merge_layer` makes of queries and keys, up to factors that cancel between them; keys repeated, values
        as they are.
        """
        queries, keys = np.empty_like(self._heads.queries), np.empty_like(self._heads.keys)
        for own, moments in zip(self._groups, self._moments, strict=True):
            own_keys, own_queries = self._heads.keys[own], self._heads.queries[own]
            units = _coordinates(own_keys, own_queries)
            found = merge_layer(units, 1, self._limits, moments, first_low)
            keys[own] = found.keys[0, :, :-1] @ own_keys.reshape(-1, own_keys.shape[-1])
            head_dim = own_queries.shape[2]
            for number, index in enumerate(np.ndindex(own_queries.shape[:2])):
                columns = slice(number * head_dim, (number + 1) * head_dim)  # a query head's maps act on its own rows
                queries[own][index] = found.queries[index][:, columns] @ own_queries[index]
        return replace(self._heads, queries=queries, keys=keys)


def _coordinates(keys: Array, queries: Array) -> Heads:
    """Heads [m, ...] whose rows are unit vectors, and nothing in the bias's column."""
    none = np.zeros((len(keys), 1, 1))
    return Heads(_units(queries), _units(keys), none, none[..., None], None)


def _units(rows: Array) -> Array:
    count = rows[..., 0].size
    return np.eye(count, count + 1).reshape(*rows.shape[:-1], count + 1)


def _gram(rows: Array, moment: Array | None) -> Array:
    """The moment of what rows [..., e] yield, and a 1 behind it."""
    flat = rows.reshape(-1, rows.shape[-1])
    seen = times(flat, moment)
    return np.block([[seen @ flat.T, seen[:, -1:]], [seen[:, -1:].T, np.ones((1, 1))]])


def least(error: Callable[[int], float], count: int) -> int:
    """The number from 0 to `count` with the least error, by a Fibonacci search.

    The error must fall towards one point and rise behind it, except for dents of up to `_DENT` numbers, which a local
    search at the end crosses. Each step of the search needs one more error.
    """
    seen: dict[int, float] = {}

    def at(number: int) -> float:
        if number not in seen:
            seen[number] = error(number) if number <= count else np.inf
        return seen[number]

    low, short, long = 0, 1, 2
    while short + long < count:
        short, long = long, short + long
    while short + long > 3:  # the range is [low, low + short + long]
        left, right = low + short, low + long
        if not (right > count or at(left) < at(right)):
            low = left
        short, long = long - short, short
    best = min(range(low, min(low + short + long, count) + 1), key=at)
    while True:
        better = min(range(max(0, best - _DENT), min(best + _DENT, count) + 1), key=at)
        if better == best:
            return best
        best = better
