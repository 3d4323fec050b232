"""The error of a merged layer's scores and values against the source's, which does not depend on maps between heads.

The shape legend is that of `attention_heads`.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from gqa_convert.merging.absorption_limits import AbsorptionLimits
from gqa_convert.merging.attention_heads import Heads, repeat_heads
from gqa_convert.merging.factorisation import adjoint, times
from gqa_convert.merging.merge_layer import Moments, centred

Array = npt.NDArray[Any]


def reconstruction_errors(
    source: Heads, merged: Heads, limits: AbsorptionLimits, moments: Moments | None
) -> tuple[float, float]:
    """The relative errors of the scores and of the output that the values produce.

    Scores are compared over all distances: under rotary positions, frequency by frequency. Inputs of queries and of
    keys count as independent; without moments every direction counts alike. In rows without rotary positions, what all
    keys have in common is left out, because it has no effect after the softmax.

    Args:
        source: [K] K/V heads.
        merged: the result with fewer K/V heads, or the source itself.
        limits: of the layer, which name the rotary pairs.
        moments: of the inputs.

    Returns:
        |source - merged| / |source| in root mean square: of the scores, and of the values' output.
    """
    if merged is source:
        return 0.0, 0.0
    query_moment, key_moment = (moments.queries, moments.keys) if moments else (None, None)
    covariance = centred(key_moment)
    new_keys, new_values = repeat_heads(merged.keys, source.groups), repeat_heads(merged.values, source.groups)
    scores, outputs = np.zeros(2), np.zeros(2)
    for head in range(source.groups):
        old, old_rotary = limits.divide_rows(source.queries[head])
        new, new_rotary = limits.divide_rows(merged.queries[head])
        old_key, old_rotary_key = limits.divide_rows(source.keys[head])
        new_key, new_rotary_key = limits.divide_rows(new_keys[head])
        scores += _squares(_products(old, -new, query_moment), _products(old_key, new_key, covariance))
        # over all distances, frequencies are orthogonal, and the mean is half the greatest square
        queries = _products(old_rotary[..., None, :], -new_rotary[..., None, :], query_moment)
        keys = _products(old_rotary_key[..., None, :], new_rotary_key[..., None, :], key_moment)
        scores += _squares(queries, keys) / 2
        columns = _products(adjoint(source.outputs[head]), -adjoint(merged.outputs[head]))
        outputs += _squares(columns, _products(source.values[head], new_values[head], key_moment))
    return _relative(scores), _relative(outputs)


def _products(old: Array, new: Array, moment: Array | None = None) -> Array:
    """[..., 2n, 2n]: the inner products of all rows of two heads [..., n, e], old ones first."""
    rows = np.concatenate([old, new], axis=-2)
    return np.asarray(times(rows, moment) @ adjoint(rows))


def _squares(left: Array, right: Array) -> Array:
    """[2]: the squares of old - new, and of old, where each is a sum of outer products of rows.

    Args:
        left: [..., 2n, 2n], inner products of old rows and of new ones with the opposite sign.
        right: [..., 2n, 2n], inner products of the rows that they are multiplied by.
    """
    products = (left * right.conj()).real
    count = products.shape[-1] // 2
    return np.array([products.sum(), products[..., :count, :count].sum()])


def _relative(squares: Array) -> float:
    lost, total = squares
    return float(np.sqrt(max(lost, 0.0) / (total or 1.0)))
