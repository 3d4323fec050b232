"""Merges the heads of one attention layer by factorisation; the maps are folded into the query and output projections.

The shape legend is that of `heads`. A moment is E[x x^T], [e, e], over calibration text, of a projection's inputs
together with the constant 1 that stands for its bias.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gqa_convert.merging.absorption_limits import AbsorptionLimits
from gqa_convert.merging.attention_heads import Heads
from gqa_convert.merging.factorisation import factor_keys, factor_rotary_keys, factor_values
from gqa_convert.merging.low_frequency import factor_partly_rotary_keys

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Moments:
    """Damped moments of a layer's inputs on calibration text."""

    queries: Array
    """[e, e], of the query projection's inputs."""
    keys: Array
    """[e, e], of the inputs of the key and value projections, which differ from the queries' in cross-attention."""


def merge_layer(
    heads: Heads,
    groups: int,
    constraints: AbsorptionLimits,
    moments: Moments | None,
    first_low: int | None = None,
) -> Heads:
    """Merge contiguous K/V heads into groups. What cannot be folded is averaged, and the rest is left alone.

    Args:
        heads: of the source.
        groups: how many K/V heads remain.
        constraints: what forbids folding.
        moments: of the inputs; without them every input direction counts alike.
        first_low: rotary pairs from this index on have low frequencies and are merged like rows without positions; None
            for none.

    Returns:
        Merged keys and values [groups, ...]; queries and outputs in the source's shapes. With no fewer groups than
        heads, the heads themselves: whether they are repeated does not matter here.
    """
    if groups >= heads.groups:
        return heads
    size = heads.groups // groups
    queries, outputs = np.empty_like(heads.queries), np.empty_like(heads.outputs)
    keys = np.empty((groups, *heads.keys.shape[1:]))
    values = np.empty((groups, *heads.values.shape[1:]))
    for group in range(groups):
        own = slice(group * size, (group + 1) * size)
        keys[group], queries[own] = _merge_keys(heads.keys[own], heads.queries[own], constraints, moments, first_low)
        values[group], outputs[own] = _merge_values(heads.values[own], heads.outputs[own], constraints, moments)
    return replace(heads, queries=queries, keys=keys, values=values, outputs=outputs)


def _factor_rotary_keys(keys: Array, queries: Array, moments: Moments | None) -> tuple[Array, Array]:
    return factor_rotary_keys(keys, queries, *((moments.keys, moments.queries) if moments else ()))


def _factor_plain_keys(keys: Array, queries: Array, moments: Moments | None) -> tuple[Array, Array]:
    return factor_keys(keys, queries, *((centred(moments.keys), moments.queries) if moments else ()))


def _merge_values(
    values: Array, outputs: Array, constraints: AbsorptionLimits, moments: Moments | None
) -> tuple[Array, Array]:
    if constraints.value_constraint:
        return values.mean(0), outputs
    return factor_values(values, outputs, moments.keys if moments else None, weighted=moments is not None)


def _merge_keys(
    keys: Array,
    queries: Array,
    constraints: AbsorptionLimits,
    moments: Moments | None,
    first_low: int | None,
) -> tuple[Array, Array]:
    """Rotary pairs as complex rows, and the rows without rotary positions."""
    if constraints.key_constraint:
        return keys.mean(0), queries
    real, imaginary = constraints.pairs
    rest = np.setdiff1d(np.arange(keys.shape[1]), np.concatenate(constraints.pairs))
    rotary = keys[:, real] + 1j * keys[:, imaginary], queries[:, :, real] + 1j * queries[:, :, imaginary]
    plain = keys[:, rest], queries[:, :, rest]
    if first_low is not None and first_low < len(real):
        measured = (moments.keys, moments.queries) if moments else ()
        rotary_key, plain_key, rotary_queries, plain_queries = factor_partly_rotary_keys(
            (rotary[0], plain[0]), (rotary[1], plain[1]), first_low, *measured
        )
    else:
        rotary_key, rotary_queries = _factor_rotary_keys(*rotary, moments) if len(real) else (rotary[0][0], rotary[1])
        plain_key, plain_queries = _factor_plain_keys(*plain, moments) if len(rest) else (plain[0][0], plain[1])
    shared, new = np.empty_like(keys[0]), np.empty_like(queries)
    shared[real], shared[imaginary], shared[rest] = rotary_key.real, rotary_key.imag, plain_key
    new[:, :, real], new[:, :, imaginary] = rotary_queries.real, rotary_queries.imag
    new[:, :, rest] = plain_queries
    return shared, new


def centred(moment: Array) -> Array:
    """The covariance of a moment: what all keys have in common has no effect after the softmax."""
    mean = moment[:, -1:] / moment[-1, -1]
    return np.asarray(moment - mean @ mean.T * moment[-1, -1])
