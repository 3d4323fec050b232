"""The functions that rewritten tensors are computed by: from the type of the result, and whole arrays of the source, to
one array.

Shape legend: H heads, c head_dim, d inputs. A linear weight is [rows, d], its bias [rows].
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gqa_convert.families import layouts
from gqa_convert.families.layouts import Role, Section

Array = npt.NDArray[Any]
DType = np.dtype[Any]

WIDE: Final = {"BF16": "F32", "F16": "F32", "F32": "F64", "F64": "F64"}
"""The type in which a tensor is held that is multiplied by another: products of two numbers are exact in it."""

_BLOCK_ROWS = 256


def rotary_order(head_dim: int, rotated: int) -> list[int]:
    """The rows of a head in which rotary pairs (2j, 2j + 1) of the first `rotated` rows become (j, j + rotated / 2)."""
    return [*range(0, rotated, 2), *range(1, rotated, 2), *range(rotated, head_dim)]


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of some roles in a projection, or in its bias."""

    sections: tuple[Section, ...]
    """Where the heads of all roles lie."""
    roles: tuple[Role, ...]
    """Those that are taken; with several, those of each head follow one another."""
    rotated: int
    """Rows of a query's or a key's head that are turned in pairs of neighbours."""

    @property
    def rows(self) -> int:
        """The rows that are taken."""
        return sum(section.rows for section in self.sections if section.role in self.roles)

    def of(self, tensor: Array) -> Array:
        """The rows of the heads, [rows, ...]."""
        taken = []
        for section, heads in zip(self.sections, layouts.split(tensor, self.sections), strict=True):
            if section.role in self.roles:
                is_turned = self.rotated and section.role != "value"
                taken.append(heads[:, rotary_order(section.head_rows, self.rotated)] if is_turned else heads)
        return np.stack(taken, axis=1).reshape(-1, *tensor.shape[1:])


def move(_: DType, tensor: Array, *, heads: Heads | None, is_transposed: bool = False) -> Array:
    """Some heads of a bias, or of a weight that may be stored [d, rows]; all rows where `heads` is None."""
    upright = tensor.T if is_transposed else tensor
    return heads.of(upright) if heads else upright


def fold_gain(dtype: DType, weight: Array, gain: Array, *, heads: Heads | None) -> Array:
    """The rows of a weight behind a norm that has lost its gain [d]."""
    folded = move(dtype, weight, heads=heads).astype(dtype)
    folded *= gain.astype(dtype)
    return folded


def fold_bias(
    dtype: DType, weight: Array, norm_bias: Array, bias: Array | None = None, *, heads: Heads | None
) -> Array:
    """The bias of a projection behind a norm that has lost its bias [d]: the rows of weight @ norm_bias + bias.

    Products are summed pairwise in float64, so that every machine gets the same numbers.
    """
    rows, shift = move(dtype, weight, heads=heads), norm_bias.astype(np.float64)
    total = np.empty(len(rows))
    for first in range(0, len(rows), _BLOCK_ROWS):
        block = rows[first : first + _BLOCK_ROWS].astype(np.float64)
        total[first : first + _BLOCK_ROWS] = (block * shift).sum(axis=1)
    if bias is not None:
        total += move(dtype, bias, heads=heads)
    return total.astype(dtype)


def fill(dtype: DType, *, count: int, value: float) -> Array:
    """A vector of one value."""
    return np.full(count, value, dtype)


def unit_rows(dtype: DType, weight: Array) -> Array:
    """A matrix whose rows are divided by their lengths, as torch.nn.functional.normalize does it."""
    result = np.empty(weight.shape, dtype)
    for first in range(0, len(weight), _BLOCK_ROWS):
        wide = weight[first : first + _BLOCK_ROWS].astype(np.float64)
        lengths = np.sqrt(np.einsum("rc,rc->r", wide, wide))[:, None]
        result[first : first + _BLOCK_ROWS] = wide / np.maximum(lengths, 1e-12)
    return result


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
