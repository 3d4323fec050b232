"""The baselines of GQA conversion, a tensor at a time: the mean of a group's heads, or the first of
them (Ainslie et al. 2023, section 2.1).
"""

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import numpy as np

from gqa_convert.errors import NonFiniteError

from .factorisation import Array
from .methods import Pooling

POOLINGS: Mapping[Pooling, Callable[[Array], Array]] = {
    "mean": lambda heads: np.asarray(reduce(np.add, heads) / len(heads)),
    "first": lambda heads: np.asarray(heads[0]),
}
"""By method, what it makes of numbers of a group's heads, [m, n] -> [n]. These come in
blocks: a number of the result depends on those in its place alone.
"""
_BLOCK_NUMBERS = 1 << 16
"""Numbers merged at a time, over all heads of a group: as many as a core's cache holds in float32.
"""


def pool_groups(
    heads: Array, groups: int, pooling: Pooling, dtype: np.dtype[Any], name: str
) -> tuple[Array, float, float]:
    """Merge contiguous heads into groups, and round each number once, to nearest even. Sums are in
    head order, in float32 for float16 and bfloat16, in float64 for float32 and float64.

    Args:
        heads: [K, ...], in memory order.
        groups: N, a divisor of K.
        pooling: how the K / N heads of a group become one.
        dtype: of the result.
        name: of the tensor, for the error message.

    Returns:
        The merged heads, [N, ...]; the sum of |head - merged head|^2 over all heads; and that of
        |head|^2.

    Raises:
        NonFiniteError: a number is NaN or Inf.
    """
    size, pool = len(heads) // groups, POOLINGS[pooling]
    step = _BLOCK_NUMBERS // size
    wide_type: Any = np.float32 if heads.itemsize == 2 else np.float64
    grouped = heads.reshape(groups, size, -1)
    merged = np.empty((groups, grouped.shape[2]), dtype)
    squared_error = squared_norm = 0.0
    for group, own in enumerate(grouped):
        for start in range(0, own.shape[1], step):
            block = own[:, start : start + step].astype(wide_type)
            if not np.isfinite(block).all():
                raise NonFiniteError(
                    f"tensor {name} holds NaN or Inf, which would spread to every merged "
                    "head: repair the checkpoint first"
                )
            squared_norm += float(np.einsum("hn,hn->", block, block))
            rounded = pool(block).astype(dtype)
            merged[group, start : start + step] = rounded
            block -= rounded.astype(wide_type)
            squared_error += float(np.einsum("hn,hn->", block, block))
    return merged.reshape(groups, *heads.shape[1:]), squared_error, squared_norm
