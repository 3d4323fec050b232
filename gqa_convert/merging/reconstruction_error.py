"""The error of a merged layer's scores and values against the source's, which does not depend on maps between heads.

The shape legend is that of `attention_heads`.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from gqa_convert.merging.absorption_limits import AbsorptionLimits
from gqa_convert.merging.attention_heads import Heads, repeat_heads
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
    query_moment, key_moment, key_covariance = None, None, None
    if moments is not None:
        query_moment, key_moment, key_covariance = moments.queries, moments.keys, centred(moments.keys)
    new_keys, new_values = repeat_heads(merged.keys, source.groups), repeat_heads(merged.values, source.groups)
    plain = limits.plain_rows(source.keys.shape[1])
    plain = np.concatenate([plain, plain + source.keys.shape[1]])  # of the source and of the result
    scores, outputs = np.zeros(2), np.zeros(2)
    for head in range(source.groups):
        queries = _inner_products(source.queries[head], -merged.queries[head], query_moment)
        keys = _inner_products(source.keys[head], new_keys[head], key_covariance)
        scores += _squares(queries[:, plain[:, None], plain], keys[plain[:, None], plain])
        if (
            limits.pairs.size
        ):  # over all distances, frequencies are orthogonal, and the mean is half the greatest square
            keys = _inner_products(source.keys[head], new_keys[head], key_moment)
            scores += _squares(_of_pairs(queries, limits.pairs), _of_pairs(keys, limits.pairs)) / 2
        columns, new_columns = source.outputs[head].swapaxes(1, 2), merged.outputs[head].swapaxes(1, 2)
        values = _inner_products(source.values[head], new_values[head], key_moment)
        outputs += _squares(_inner_products(columns, -new_columns, None), values)
    return _relative(scores), _relative(outputs)


def _inner_products(old: Array, new: Array, moment: Array | None) -> Array:
    """[..., 2n, 2n]: those of all rows of two heads [..., n, e], old ones first; the moment's are the inputs'."""
    rows = np.concatenate([old, new], axis=-2)
    seen = rows if moment is None else rows @ moment
    return np.asarray(seen @ rows.swapaxes(-1, -2))


def _of_pairs(products: Array, pairs: Array) -> Array:
    """[..., f, 2, 2], complex: the inner products of each rotary pair's complex rows, old and new."""
    count = products.shape[-1] // 2
    real, imaginary = (np.stack([rows, rows + count], axis=1) for rows in pairs)

    def between(left: Array, right: Array) -> Array:
        return np.asarray(products[..., left[:, :, None], right[:, None]])

    return (
        between(real, real) + between(imaginary, imaginary) + 1j * (between(imaginary, real) - between(real, imaginary))
    )


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
