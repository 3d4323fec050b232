"""The baselines of GQA conversion: mean pooling and the first head (Ainslie et al. 2023, section 2.1).

The rows of a K/V head are contiguous in memory, so that blocks of numbers suffice and shapes do not matter.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gqa_convert.errors import NonFiniteError
from gqa_convert.merging.methods import Pooling

Array = npt.NDArray[Any]


def _mean(heads: Array, out: Array) -> None:
    np.copyto(out, heads[0])
    for head in heads[1:]:
        np.add(out, head, out=out)
    np.divide(out, len(heads), out=out)


def _first(heads: Array, out: Array) -> None:
    np.copyto(out, heads[0])


_POOLINGS: Final[Mapping[Pooling, Callable[[Array, Array], None]]] = {"mean": _mean, "first": _first}
"""Each writes one head [...], before rounding, into its second argument."""


def pool(heads: Array, pooling: Pooling, out: Array) -> Array:
    """Merge several heads into one, in the accumulation type.

    `mean` is the sum in head order divided by the number of heads, `first` is head 0.

    Args:
        heads: [m, ...], in the accumulation type.
        pooling: how to merge.
        out: [...], where the merged head goes.

    Returns:
        `out`.
    """
    _POOLINGS[pooling](heads, out)
    return out


def accumulation_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type in which heads are summed: float32 for float16 and bfloat16, float64 for float32 and float64."""
    return np.dtype(np.float32) if dtype.itemsize == 2 else np.dtype(np.float64)


class BlockMerger:
    """Merges blocks of up to `capacity` numbers from `heads` heads, in buffers that are allocated once.

    Args:
        heads: how many source heads share a group.
        dtype: the type of the numbers, in and out.
        capacity: numbers per head and block, at most.
    """

    def __init__(self, heads: int, dtype: np.dtype[Any], capacity: int) -> None:
        self.source: Array = np.empty((heads, capacity), dtype)
        """Fill `source[:, :n]` with a block of each head, then call `merge(n, ...)`."""
        wide = accumulation_dtype(dtype)
        self._wide = np.empty((heads, capacity), wide)
        self._merged = np.empty(capacity, wide)
        self._result = np.empty(capacity, dtype)
        self.squared_error = 0.0
        """Sum over all blocks so far of |head - result|^2, the merge error."""
        self.squared_norm = 0.0
        """Sum over all blocks so far of |head|^2."""

    def merge(self, count: int, pooling: Pooling, what: str) -> Array:
        """Merge the first `count` numbers of every head by `pool`, and round them to nearest even.

        Args:
            count: numbers per head in this block.
            pooling: how to merge.
            what: the name of the tensor, for the error message.

        Returns:
            `count` merged numbers of the source's type, in a buffer that the next call reuses.

        Raises:
            NonFiniteError: a number is NaN or Inf.
        """
        wide, result = self._wide[:, :count], self._result[:count]
        np.copyto(wide, self.source[:, :count])
        norm = float(np.einsum("hn,hn->", wide, wide))
        # a float32 sum of squares may overflow although every number is finite
        if not np.isfinite(norm) and not np.isfinite(wide).all():
            raise NonFiniteError(
                f"{what} holds NaN or Inf, which would spread to every merged head: repair the checkpoint first"
            )
        np.copyto(result, pool(wide, pooling, self._merged[:count]), casting="same_kind")
        self.squared_norm += norm
        np.subtract(wide, result.astype(wide.dtype), out=wide)
        self.squared_error += float(np.einsum("hn,hn->", wide, wide))
        return result
