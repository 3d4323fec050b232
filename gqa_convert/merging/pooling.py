"""The baselines of GQA conversion: mean pooling and the first head (Ainslie et al. 2023, section 2.1)."""

from typing import Any

import numpy as np
import numpy.typing as npt

from gqa_convert.errors import NonFiniteError
from gqa_convert.merging.methods import Pooling

Array = npt.NDArray[Any]

_BLOCK_NUMBERS = 1 << 16
"""Numbers merged at a time, over all heads of a group: as many as a core's cache holds in float32."""


def accumulation_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type in which heads are summed: float32 for float16 and bfloat16, float64 for float32 and float64."""
    return np.dtype(np.float32) if dtype.itemsize == 2 else np.dtype(np.float64)


def pool(heads: Array, pooling: Pooling) -> Array:
    """Merge heads [m, ...] into one, [...], in their own type: head 0, or the sum in head order divided by m."""
    merged: Array = heads[0].copy()
    match pooling:
        case "first":
            return merged
        case "mean":
            for head in heads[1:]:
                merged += head
            merged /= len(heads)
            return merged


def pool_groups(
    heads: Array, groups: int, pooling: Pooling, dtype: np.dtype[Any], name: str
) -> tuple[Array, float, float]:
    """Merge contiguous heads into groups, and round each number once, to nearest even.

    Args:
        heads: [K, ...], in memory order.
        groups: N, a divisor of K.
        pooling: how the K / N heads of a group become one.
        dtype: of the result.
        name: of the tensor, for the error message.

    Returns:
        The merged heads, [N, ...]; the sum of |head - merged head|^2 over all heads; and that of |head|^2.

    Raises:
        NonFiniteError: a number is NaN or Inf.
    """
    size = len(heads) // groups
    step = max(1024, _BLOCK_NUMBERS // size)
    merged = np.empty((groups, *heads.shape[1:]), dtype)
    flat = merged.reshape(groups, -1)
    squared_error = squared_norm = 0.0
    for group, own in enumerate(heads.reshape(groups, size, -1)):
        for first in range(0, own.shape[1], step):
            wide = own[:, first : first + step].astype(accumulation_dtype(heads.dtype))
            norm = float(np.einsum("hn,hn->", wide, wide))
            # a float32 sum of squares may overflow although every number is finite
            if not np.isfinite(norm) and not np.isfinite(wide).all():
                raise NonFiniteError(
                    f"tensor {name} holds NaN or Inf, which would spread to every merged head: repair the checkpoint first"
                )
            rounded = pool(wide, pooling).astype(dtype)
            flat[group, first : first + step] = rounded
            wide -= rounded.astype(wide.dtype)
            squared_norm += norm
            squared_error += float(np.einsum("hn,hn->", wide, wide))
    return merged, squared_error, squared_norm
