"""The arithmetic of rewritten tensors. Each function takes the type of the result and whole arrays
of the source.

Shape legend: d inputs. A linear weight is [rows, d], its bias [rows]. `rows` are the numbers of
those that are taken, in their new order.
"""

from typing import Any

import numpy as np

from gqa_convert.families.layouts import Sections, row_numbers
from gqa_convert.merging.factorisation import Array

DType = np.dtype[Any]

WIDE = {"BF16": "F32", "F16": "F32", "F32": "F64", "F64": "F64"}
"""The type in which a tensor is held that is multiplied by another: products of two numbers are
exact in it.
"""

_BLOCK_ROWS = 256


def head_rows(sections: Sections) -> Array:
    """The rows of the heads of some sections; with several, those of each head follow one
    another.
    """
    taken = [row_numbers(section) for section in sections]
    return np.stack(taken, axis=1).reshape(-1)


def move(_: DType, tensor: Array, *, rows: Array | None, is_transposed: bool = False) -> Array:
    """A weight, perhaps stored [d, rows], or a bias; all rows where `rows` is None."""
    rows_first = tensor.T if is_transposed else tensor
    return rows_first if rows is None else rows_first[rows]


def fold_gain(dtype: DType, weight: Array, gain: Array, *, rows: Array | None) -> Array:
    """The weight behind a norm that has lost its gain [d]."""
    folded = move(dtype, weight, rows=rows).astype(dtype)
    folded *= gain.astype(dtype)
    return folded


def fold_bias(dtype: DType, *tensors: Array, rows: Array | None) -> Array:
    """The bias behind a norm that has lost its bias [d]: weight @ norm_bias, plus the projection's
    own bias if it has one.

    Products are summed pairwise in float64, so that every machine gets the same numbers.

    Args:
        dtype: of the result.
        tensors: the projection's bias if it has one, the norm's, and the weight.
        rows: those that are taken.
    """
    *bias, norm_bias, weight = tensors
    shift = norm_bias.astype(np.float64)
    taken = move(dtype, weight, rows=rows)
    sums = []
    for first in range(0, len(taken), _BLOCK_ROWS):
        block = taken[first : first + _BLOCK_ROWS].astype(np.float64)
        sums.append((block * shift).sum(axis=1))
    total = np.concatenate(sums)
    for each in bias:
        total += move(dtype, each, rows=rows)
    return total.astype(dtype)


def fill(dtype: DType, *_: Array, count: int, value: float) -> Array:
    """A vector of one value."""
    return np.full(count, value, dtype)
