"""Merges the heads of one attention layer by a method whose maps the query and output projections absorb.

Shape legend as in `heads`; a moment is E[x x^T] over calibration text of a projection's inputs with the 1 that carries
its bias, [e, e].
"""

from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from gqa_convert.merging.alignment import align_rotary_keys, align_values
from gqa_convert.merging.factorisation import factor_keys, factor_rotary_keys, factor_values
from gqa_convert.merging.folding.constraints import FoldingConstraints
from gqa_convert.merging.folding.heads import Heads
from gqa_convert.merging.low_frequency import factor_partly_rotary_keys

Array = npt.NDArray[Any]
FoldingMethod = Literal["align", "factor", "fit"]
FOLDING_METHODS: Final[tuple[FoldingMethod, ...]] = ("align", "factor", "fit")


@dataclass(frozen=True, slots=True)
class Moments:
    """What calibration text showed of a layer's inputs, damped."""

    queries: Array
    """[e, e], of what queries are made from."""
    keys: Array
    """[e, e], of what keys and values are made from: the same, but for cross-attention."""


def merge_layer(
    heads: Heads,
    groups: int,
    method: str,
    constraints: FoldingConstraints,
    moments: Moments | None,
    slow: int | None = None,
) -> Heads:
    """Merge contiguous K/V heads into groups.

    Args:
        heads: of the source.
        groups: how many K/V heads remain.
        method: `align` or `factor`; what can't be absorbed is averaged, and the rest is left alone.
        freedom: what can be absorbed.
        moments: for `factor`; without them every input direction counts alike.
        slow: rotary pairs from this one on, which turn little over a whole context, are merged as if they did not turn.

    Returns:
        Merged keys and values [groups, ...]; queries and outputs in the source's shapes. With no fewer groups than
        heads, the heads as
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
        keys[group], queries[own] = _merge_keys(heads.keys[own], heads.queries[own], method, constraints, moments, slow)
        values[group], outputs[own] = _merge_values(heads.values[own], heads.outputs[own], method, constraints, moments)
    return replace(heads, queries=queries, keys=keys, values=values, outputs=outputs)


def _merge_values(
    values: Array, outputs: Array, method: str, constraints: FoldingConstraints, moments: Moments | None
) -> tuple[Array, Array]:
    if constraints.value_constraint:
        return values.mean(0), outputs
    if method == "align":
        return align_values(values, outputs)
    return factor_values(values, outputs, moments.keys if moments else None, weighted=moments is not None)


def _merge_keys(
    keys: Array, queries: Array, method: str, constraints: FoldingConstraints, moments: Moments | None, slow: int | None
) -> tuple[Array, Array]:
    """Rotary pairs as complex rows, and the rows that do not turn."""
    if constraints.key_constraint:
        return keys.mean(0), queries
    real, imaginary = constraints.pairs
    rest = np.setdiff1d(np.arange(keys.shape[1]), np.concatenate(constraints.pairs))
    turning = keys[:, real] + 1j * keys[:, imaginary], queries[:, :, real] + 1j * queries[:, :, imaginary]
    still = keys[:, rest], queries[:, :, rest]
    if slow is not None and slow < len(real):
        measured = (moments.keys, moments.queries) if moments else ()
        merged = factor_partly_rotary_keys((turning[0], still[0]), (turning[1], still[1]), slow, *measured)
    else:
        merged = *_merge_rotary(*turning, method, moments), *_merge_still(*still, method, moments)
        merged = merged[0], merged[2], merged[1], merged[3]
    shared, new = np.empty_like(keys[0]), np.empty_like(queries)
    shared[real], shared[imaginary], shared[rest] = merged[0].real, merged[0].imag, merged[1]
    new[:, :, real], new[:, :, imaginary], new[:, :, rest] = merged[2].real, merged[2].imag, merged[3]
    return shared, new


def _merge_rotary(keys: Array, queries: Array, method: str, moments: Moments | None) -> tuple[Array, Array]:
    if not keys.shape[1]:
        return keys[0], queries
    if method == "align":
        return align_rotary_keys(keys, queries)
    return factor_rotary_keys(keys, queries, *((moments.keys, moments.queries) if moments else ()))


def _merge_still(keys: Array, queries: Array, method: str, moments: Moments | None) -> tuple[Array, Array]:
    if not keys.shape[1]:
        return keys[0], queries
    if method == "align":  # queries stand to keys as the output's columns do to values
        shared, columns = align_values(keys, np.swapaxes(queries, -1, -2))
        return shared, np.swapaxes(columns, -1, -2)
    return factor_keys(keys, queries, *((centred(moments.keys), moments.queries) if moments else ()))


def centred(moment: Array) -> Array:
    """The covariance: a softmax does not see what is the same for all keys."""
    mean = moment[:, -1:] / moment[-1, -1]
    return np.asarray(moment - mean @ mean.T * moment[-1, -1])
