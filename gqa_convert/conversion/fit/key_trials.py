"""Merges keys for many choices of the first low-frequency pair at little cost: products with the inputs' moment are
computed once.

Merging is linear in the rows of keys and of queries. So it is done with coordinates in the place of rows, and with the
Gram matrix of the rows in the place of the inputs' moment; only the maps that come out are applied to the rows. Shape
legend as in `gqa_convert.merging.attention_heads`, with m heads in a group.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gqa_convert.merging.absorption_limits import AbsorptionLimits
from gqa_convert.merging.attention_heads import Heads
from gqa_convert.merging.merge_layer import Moments, merge_layer

Array = npt.NDArray[Any]


class KeyTrials:
    """Merges of keys that differ in where the low-frequency pairs begin.

    Args:
        heads: of the source.
        groups: how many K/V heads remain.
        constraints: what forbids folding; the keys are free.
        moments: of the inputs.
    """

    def __init__(self, heads: Heads, groups: int, constraints: AbsorptionLimits, moments: Moments) -> None:
        self._heads, self._size = heads, heads.groups // groups
        self._folding_constraints = replace(constraints, value_constraint="values are not looked at")
        self._moments = [
            Moments(_gram(heads.queries[own], moments.queries), _gram(heads.keys[own], moments.keys))
            for own in self._groups()
        ]

    def _groups(self) -> list[slice]:
        return [slice(first, first + self._size) for first in range(0, self._heads.groups, self._size)]

    def merged(self, low_frequency: int) -> Heads:
        """What `merge_layer` makes of queries and keys, up to factors that cancel between them; keys repeated, values
        as they are.
        """
        queries, keys = np.empty_like(self._heads.queries), np.empty_like(self._heads.keys)
        for own, moments in zip(self._groups(), self._moments, strict=True):
            before, asking = self._heads.keys[own], self._heads.queries[own]
            found = merge_layer(_coordinates(before, asking), 1, self._folding_constraints, moments, low_frequency)
            keys[own] = found.keys[0, :, :-1] @ before.reshape(-1, before.shape[-1])
            head_dim = asking.shape[2]
            for place, index in enumerate(np.ndindex(asking.shape[:2])):  # a query head's maps act on its own rows
                queries[own][index] = found.queries[index][:, place * head_dim : (place + 1) * head_dim] @ asking[index]
        return replace(self._heads, queries=queries, keys=keys)


def _coordinates(keys: Array, queries: Array) -> Heads:
    """Heads [m, ...] whose rows are unit vectors, and nothing in the bias's column."""
    none = np.zeros((len(keys), 1, 1))
    return Heads(
        queries=_units(queries.shape[:-1]),
        keys=_units(keys.shape[:-1]),
        values=none,
        outputs=none[..., None],
        output_bias=None,
    )


def _units(shape: tuple[int, ...]) -> Array:
    count = int(np.prod(shape))
    return np.eye(count, count + 1).reshape(*shape, count + 1)


def _gram(rows: Array, moment: Array) -> Array:
    """The moment of what rows [..., e] yield, and a 1 behind it."""
    flat = rows.reshape(-1, rows.shape[-1])
    seen = flat @ moment
    return np.block([[seen @ flat.T, seen[:, -1:]], [seen[:, -1:].T, moment[-1:, -1:]]])
