"""The arithmetic of rewritten tensors. Each function takes the type of the result and whole arrays of the source.

Shape legend: d inputs. A linear weight is [rows, d], its bias [rows]. `rows` are the numbers of those that are taken, in
their new order.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from gqa_convert.families.layouts import Role, Sections
from gqa_convert.merging.factorisation import Array

DType = np.dtype[Any]

WIDE = {"BF16": "F32", "F16": "F32", "F32": "F64", "F64": "F64"}
"""The type in which a tensor is held that is multiplied by another: products of two numbers are exact in it."""

_BLOCK_ROWS = 256


def rotary_order(head_dim: int, rotated: int) -> list[int]:
    """The rows of a head in which rotary pairs (2j, 2j + 1) of the first `rotated` rows become (j, j + rotated / 2)."""
    return [*range(0, rotated, 2), *range(1, rotated, 2), *range(rotated, head_dim)]


def head_rows(sections: Sections, roles: tuple[Role, ...], rotated: int) -> Array:
    """The rows of the heads of some roles.

    Args:
        sections: where the heads of all roles lie.
        roles: those that are taken; with several, those of each head follow one another.
        rotated: rows of a query's or a key's head that are turned in pairs of neighbours.
    """
    taken = []
    for section in sections:
        if section.role in roles:
            order = rotary_order(section.head_rows, 0 if section.role == "value" else rotated)
            taken.append(np.add.outer(section.starts, order))
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
    """The bias behind a norm that has lost its bias [d]: weight @ norm_bias, plus the projection's own bias if it has one.

    Products are summed pairwise in float64, so that every machine gets the same numbers.

    Args:
        dtype: of the result.
        tensors: the projection's bias if it has one, the norm's, and the weight.
        rows: those that are taken.
    """
    *bias, norm_bias, weight = tensors
    shift = norm_bias.astype(np.float64)
    total = np.concatenate([(block * shift).sum(axis=1) for block in _wide_blocks(move(dtype, weight, rows=rows))])
    for each in bias:
        total += move(dtype, each, rows=rows)
    return total.astype(dtype)


def fill(dtype: DType, *_: Array, count: int, value: float) -> Array:
    """A vector of one value."""
    return np.full(count, value, dtype)


def unit_rows(dtype: DType, weight: Array) -> Array:
    """A matrix whose rows are divided by their lengths, as torch.nn.functional.normalize does it."""
    blocks = []
    for block in _wide_blocks(weight):
        lengths = np.sqrt(np.einsum("rc,rc->r", block, block))[:, None]
        blocks.append((block / np.maximum(lengths, 1e-12)).astype(dtype))
    return np.concatenate(blocks)


def _wide_blocks(weight: Array) -> Iterator[Array]:
    """A matrix in float64, some rows at a time."""
    for first in range(0, len(weight), _BLOCK_ROWS):
        yield weight[first : first + _BLOCK_ROWS].astype(np.float64)


def scale_blocks(dtype: DType, weight: Array, scales: Array, *, block: tuple[int, int] | None) -> Array:
    """An FP8 weight [..., rows, d] times the scales of its blocks, or its one scale.

    transformers takes the size of a block from the number of scales. For a matrix whose last block is cut off, that
    gives most numbers another block's scale.
    """
    wide, each = weight.astype(np.float32), scales.astype(np.float32)
    if block is None:
        return (wide * each.reshape(())).astype(dtype)
    rows, columns = wide.shape[-2:]
    each = each.repeat(block[0], -2)[..., :rows, :].repeat(block[1], -1)[..., :columns]
    return (wide * each).astype(dtype)


def unpack_fp4(dtype: DType, blocks: Array, scales: Array) -> Array:
    """MXFP4 experts [experts, outputs, d / 32, 16], two numbers of four bits in a byte and one power of two for each 32
    numbers, as [experts, d, outputs].
    """
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    values = np.concatenate([values, -values])
    pairs = np.stack([values[blocks & 15], values[blocks >> 4]], axis=-1)
    numbers = np.ldexp(pairs.reshape(*blocks.shape[:-1], 32), scales.astype(np.int32)[..., None] - 127)
    experts: Array = numbers.reshape(*blocks.shape[:2], -1).swapaxes(1, 2).astype(dtype)
    return experts
