"""The functions that rewritten tensors are computed by: from whole arrays of the source to one array.

Shape legend: H heads, c head_dim, d inputs. A linear weight is [rows, d], its bias [rows].
"""

from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from gqa_convert.checkpoint.dtypes import DTYPES

Array = npt.NDArray[Any]

WIDE: Final = {"BF16": "F32", "F16": "F32", "F32": "F64", "F64": "F64"}
"""The type in which a tensor is held that is multiplied by another: products of two numbers are exact in it."""

_BLOCK_ROWS = 256


def head_rows(starts: tuple[int, ...], head_dim: int, rotated: int) -> Array:
    """The rows of all heads of a role, [H, c]; rotary pairs (2j, 2j + 1) of the first `rotated` rows of a head become
    (j, j + rotated / 2).
    """
    order = [*range(0, rotated, 2), *range(1, rotated, 2), *range(rotated, head_dim)]
    rows: Array = np.array(starts)[:, None] + np.array(order)
    return rows


@dataclass(frozen=True, slots=True)
class Selection:
    """Which rows of a weight or of a bias are taken, and what they are multiplied by."""

    rows: Array | None = None
    """All where None."""
    factors: Array | None = None
    """Of each row that is taken."""
    transposed: bool = False
    """Whether a weight is stored [d, rows]."""

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of what is taken of a tensor of this shape."""
        upright = shape[::-1] if self.transposed else shape
        return upright if self.rows is None else (len(self.rows), *upright[1:])

    def of(self, tensor: Array) -> Array:
        """The rows, in the type of the tensor and not yet multiplied."""
        upright = tensor.T if self.transposed else tensor
        return upright if self.rows is None else upright[self.rows]


def take(tensor: Array, gain: Array | None = None, *, selection: Selection, dtype: str) -> Array:
    """The selected rows, multiplied, in the type `dtype`. The columns of a weight behind a norm without its gain [d] take
    it over.
    """
    wide = selection.of(tensor).astype(DTYPES[dtype], copy=False)
    if selection.factors is not None:
        wide *= selection.factors.astype(wide.dtype).reshape(-1, *[1] * (wide.ndim - 1))
    if gain is not None:
        wide *= gain.astype(wide.dtype)
    return wide


def fold_bias(weight: Array, norm_bias: Array, bias: Array | None = None, *, selection: Selection, dtype: str) -> Array:
    """The bias of a projection behind a norm without its bias [d]: the selected rows of weight @ norm_bias + bias.

    Products are summed pairwise in float64, so that every machine gets the same numbers.
    """
    upright = selection.of(weight)
    shift = norm_bias.astype(np.float64)
    total = np.empty(len(upright))
    for first in range(0, len(upright), _BLOCK_ROWS):
        block = upright[first : first + _BLOCK_ROWS]
        total[first : first + _BLOCK_ROWS] = (block.astype(np.float64) * shift).sum(axis=1)
    if bias is not None:
        total += selection.of(bias)
    return total.astype(DTYPES[dtype])


def fill(*, count: int, value: float, dtype: str) -> Array:
    """A vector of one value."""
    return np.full(count, value, DTYPES[dtype])


def unit_rows(weight: Array) -> Array:
    """A matrix whose rows are divided by their lengths, as torch.nn.functional.normalize does it."""
    result = np.empty_like(weight)
    for first in range(0, len(weight), _BLOCK_ROWS):
        wide = weight[first : first + _BLOCK_ROWS].astype(np.float64)
        lengths = np.sqrt(np.einsum("rc,rc->r", wide, wide))[:, None]
        result[first : first + _BLOCK_ROWS] = wide / np.maximum(lengths, 1e-12)
    return result


def scale_blocks(weight: Array, scales: Array, *, block: tuple[int, int] | None) -> Array:
    """An FP8 weight [..., rows, d] times the scales of its blocks, or its one scale, in bfloat16.

    transformers takes the size of a block from the number of scales. For a matrix whose last block is cut off, that
    gives most numbers another block's scale.
    """
    wide = weight.astype(np.float32)
    if block is None:
        return (wide * scales.astype(np.float32).reshape(())).astype(ml_dtypes.bfloat16)
    rows, columns = wide.shape[-2:]
    each = scales.astype(np.float32).repeat(block[0], -2)[..., :rows, :].repeat(block[1], -1)[..., :columns]
    return (wide * each).astype(ml_dtypes.bfloat16)


def unpack_fp4(blocks: Array, scales: Array) -> Array:
    """MXFP4 experts [experts, outputs, d / 32, 16], two numbers of four bits in a byte and one power of two for each 32
    numbers, as [experts, d, outputs] in bfloat16.
    """
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    values = np.concatenate([values, -values])
    pairs = np.stack([values[blocks & 15], values[blocks >> 4]], axis=-1)
    numbers = np.ldexp(pairs.reshape(*blocks.shape[:-1], 32), scales.astype(np.int32)[..., None] - 127)
    experts: Array = numbers.reshape(*blocks.shape[:2], -1).swapaxes(1, 2).astype(ml_dtypes.bfloat16)
    return experts
