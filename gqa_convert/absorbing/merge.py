"""Merges the heads of one attention layer by a method whose maps the query and output projections absorb.

Shape legend as in `heads`; a moment is E[x x^T] over calibration text of a projection's inputs with the 1 that carries its bias, [e, e].
"""

from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from gqa_convert.absorbing.barriers import Freedom
from gqa_convert.absorbing.heads import Heads
from gqa_convert.merging.alignment import align_rotary_keys, align_values
from gqa_convert.merging.factorisation import factor_keys, factor_rotary_keys, factor_values

Array = npt.NDArray[Any]
AbsorbingMethod = Literal["align", "factor", "fit"]
ABSORBING_METHODS: Final[tuple[AbsorbingMethod, ...]] = ("align", "factor", "fit")


@dataclass(frozen=True, slots=True)
class Moments:
    """What calibration text showed of a layer's inputs, damped."""

    queries: Array
    """[e, e], of what queries are made from."""
    keys: Array
    """[e, e], of what keys and values are made from: the same, but for cross-attention."""


def merge_layer(
    heads: Heads, groups: int, method: str, freedom: Freedom, moments: Moments | None, slow: int | None = None
) -> Heads:  # fmt: skip
    """Merge contiguous K/V heads into groups.

    Args:
        heads: of the source.
        groups: how many K/V heads remain.
        method: `align` or `factor`; what can't be absorbed is averaged, and the rest is left alone.
        freedom: what can be absorbed.
        moments: for `factor`; without them every input direction counts alike.
        slow: rotary pairs from this one on, which turn little over a whole context, are merged as if they did not turn.

    Returns:
        Merged keys and values [groups, ...]; queries and outputs in the source's shapes. With no fewer groups than heads, the heads as
        they are: whether they are repeated does not matter here.
    """
    if groups >= heads.groups:
        return heads
    size = heads.groups // groups
    queries, outputs = np.empty_like(heads.queries), np.empty_like(heads.outputs)
    keys = np.empty((groups, *heads.keys.shape[1:]))
    values = np.empty((groups, *heads.values.shape[1:]))
    for group in range(groups):
        own = slice(group * size, (group + 1) * size)
        keys[group], queries[own] = _merge_keys(heads.keys[own], heads.queries[own], method, freedom, moments, slow)
        values[group], outputs[own] = _merge_values(heads.values[own], heads.outputs[own], method, freedom, moments)
    return replace(heads, queries=queries, keys=keys, values=values, outputs=outputs)


def _merge_values(values: Array, outputs: Array, method: str, freedom: Freedom, moments: Moments | None) -> tuple[Array, Array]:
    if freedom.value_barrier:
        return values.mean(0), outputs
    if method == "align":
        return align_values(values, outputs)
    return factor_values(values, outputs, moments.keys if moments else None, weighted=moments is not None)


def _merge_keys(
    keys: Array, queries: Array, method: str, freedom: Freedom, moments: Moments | None, slow: int | None
) -> tuple[Array, Array]:  # fmt: skip
    """The rotary pairs by themselves, those that hardly turn together, then the rows that do not turn."""
    if freedom.key_barrier:
        return keys.mean(0), queries
    rest = np.setdiff1d(np.arange(keys.shape[1]), np.concatenate(freedom.pairs))
    real, imaginary = (rows[:slow] for rows in freedom.pairs)
    block = np.concatenate([rows[len(real) :] for rows in freedom.pairs])
    shared, new = np.empty_like(keys[0]), np.empty_like(queries)
    if len(block):
        measured = (moments.keys, moments.queries) if moments else ()
        shared[block], new[:, :, block] = factor_keys(keys[:, block], queries[:, :, block], *measured)
    if len(real):
        pairs = keys[:, real] + 1j * keys[:, imaginary], queries[:, :, real] + 1j * queries[:, :, imaginary]
        if method == "align":
            key, query = align_rotary_keys(*pairs)
        else:
            key, query = factor_rotary_keys(*pairs, *((moments.keys, moments.queries) if moments else ()))
        shared[real], shared[imaginary] = key.real, key.imag
        new[:, :, real], new[:, :, imaginary] = query.real, query.imag
    if len(rest):
        still = keys[:, rest], queries[:, :, rest]
        if method == "align":
            turned = np.swapaxes(still[1], -1, -2)  # queries stand to keys as the output's columns do to values
            shared[rest], columns = align_values(still[0], turned)
            new[:, :, rest] = np.swapaxes(columns, -1, -2)
        else:
            shared[rest], new[:, :, rest] = factor_keys(*still, *((centred(moments.keys), moments.queries) if moments else ()))
    return shared, new


def centred(moment: Array) -> Array:
    """The covariance: a softmax does not see what is the same for all keys."""
    mean = moment[:, -1:] / moment[-1, -1]
    return np.asarray(moment - mean @ mean.T * moment[-1, -1])
