"""Merges the heads of one attention layer by factorisation; the query and output projections absorb the maps.

The shape legend is that of `attention_heads`. A moment is E[x x^T], [e, e], over calibration text, of a projection's
inputs together with the constant 1 that stands for its bias.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gqa_convert.merging.absorption_limits import AbsorptionLimits
from gqa_convert.merging.attention_heads import Heads
from gqa_convert.merging.factorisation import factor_keys, factor_rotary_keys, factor_values

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
    limits: AbsorptionLimits,
    moments: Moments | None,
    first_low: int | None = None,
) -> Heads:
    """Merge contiguous K/V heads into groups. Where no map can be absorbed, heads are averaged.

    Args:
        heads: of the source.
        groups: how many K/V heads remain.
        limits: what may be absorbed.
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
    keys, values = np.empty_like(heads.keys[:groups]), np.empty_like(heads.values[:groups])
    for group in range(groups):
        own = slice(group * size, (group + 1) * size)
        keys[group], queries[own] = _merge_keys(heads.keys[own], heads.queries[own], limits, moments, first_low)
        values[group], outputs[own] = _merge_values(heads.values[own], heads.outputs[own], limits, moments)
    return replace(heads, queries=queries, keys=keys, values=values, outputs=outputs)


def _merge_values(
    values: Array, outputs: Array, limits: AbsorptionLimits, moments: Moments | None
) -> tuple[Array, Array]:
    """The shared value head [w, e] of heads [m, w, e], and new output columns [m, r, D, w]."""
    if limits.value_constraint:
        return values.mean(0), outputs
    if moments is None:
        return factor_values(values, outputs, weighted=False)
    return factor_values(values, outputs, moments.keys)


def _merge_keys(
    keys: Array, queries: Array, limits: AbsorptionLimits, moments: Moments | None, first_low: int | None
) -> tuple[Array, Array]:
    """The shared key head [c, e] of heads [m, c, e], and new query rows [m, r, c, e].

    Everything depends on where the low frequencies begin: a frequency whose angle stays small over the whole context
    has rows that behave like rows without positions, and one real map for all of them loses far less than a complex
    number for each; but beginning too early costs far more than the map can gain. So whoever passes `first_low` has
    compared the error of the attention *with* rotary positions, at full context length.
    """
    if limits.key_constraint:
        return keys.mean(0), queries
    shared, absorbed = np.empty_like(keys[0]), np.empty_like(queries)
    query_moment, key_moment = (moments.queries, moments.keys) if moments else (None, None)
    high = replace(limits, pairs=limits.pairs[:, :first_low])
    low = limits.pairs[:, high.pairs.shape[1] :]
    plain_keys, rotary_keys = high.divide_rows(keys)
    plain_queries, rotary_queries = high.divide_rows(queries)
    real, imaginary = high.pairs
    if real.size:
        key, readers = factor_rotary_keys(rotary_keys, rotary_queries, key_moment, query_moment)
        shared[real], shared[imaginary] = key.real, key.imag
        absorbed[:, :, real], absorbed[:, :, imaginary] = readers.real, readers.imag
    # the strongest directions go to rows without positions, then to the lowest frequencies
    plain = np.concatenate([limits.plain_rows(keys.shape[1]), low.T[::-1].reshape(-1)])
    if plain.size:
        inputs = key_moment if low.size else centred(key_moment)
        shared[plain], absorbed[:, :, plain] = factor_keys(plain_keys, plain_queries, inputs, query_moment)
    return shared, absorbed


def centred(moment: Array | None) -> Array | None:
    """The covariance of a moment: what all keys have in common has no effect after the softmax."""
    if moment is None:
        return None
    mean = moment[:, -1:] / moment[-1, -1]
    return np.asarray(moment - mean @ mean.T * moment[-1, -1])
