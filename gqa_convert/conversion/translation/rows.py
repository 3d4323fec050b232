"""Executes a translation: computes one output tensor after another, a few MiB at a time."""

import math
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gqa_convert.checkpoint.dtypes import DTYPES
from gqa_convert.conversion.translation.description import Rows, Run, Shift, TranslatedTensor
from gqa_convert.errors import NonFiniteError
from gqa_convert.merging.pooling import accumulation_dtype, pool

Array = npt.NDArray[Any]

_BLOCK_NUMBERS = 1 << 18
"""The numbers in one block, over all heads that are merged: 1 MiB in float32, 2 MiB in float64."""


class Reader(Protocol):
    """Reads rows of a source tensor as an array [rows, ...] of its dtype. The array is read-only and valid until the
    next call.
    """

    def __call__(self, tensor: str, first: int, rows: int, /) -> Array: ...


class RowTranslator:
    """Computes translated tensors and records the error that merging introduces.

    Args:
        read: reads rows of the source.
    """

    def __init__(self, read: Reader) -> None:
        self._read = read
        self._vectors: dict[str, Array] = {}
        self._squares: dict[str, tuple[float, float]] = {}

    def errors(self) -> dict[str, float]:
        """Each merged tensor's |heads - merged head| / |heads| (Frobenius norms), on the source's heads before anything
        is folded.
        """
        return {name: math.sqrt(error / norm) if norm else 0.0 for name, (error, norm) in self._squares.items()}

    def blocks(self, tensor: TranslatedTensor) -> Iterator[Array]:
        """The tensor's rows from top to bottom, in contiguous blocks of its dtype. A block is valid until the next one
        is requested.

        Half-precision tensors are computed in float32, float32 and float64 tensors in float64; each number is rounded
        once.

        Raises:
            NonFiniteError: a tensor to be merged or folded holds NaN or Inf, or a folded number is too large for its
                type.
        """
        source = self._strided_reader(tensor)
        columns = math.prod(tensor.shape[1:])
        if tensor.shift:
            yield self._shifted_bias(tensor, tensor.shift, source)
            return
        for run in tensor.runs:
            copied = len(run.sources) == 1 and tensor.gain is None and run.scale == 1.0
            for first, count in _cut(run, columns):
                if copied:
                    yield np.ascontiguousarray(source(run.sources[0], first, count))
                    continue
                wide = self._wide(run, first, count, tensor, source)
                if tensor.gain:
                    wide *= self._vector(tensor.gain, columns, wide.dtype)
                yield _rounded(wide, tensor)

    def _shifted_bias(self, tensor: TranslatedTensor, shift: Shift, source: "_StridedReader") -> Array:
        """The complete bias: to each number, the product of its weight row and the norm's bias is added."""
        parts = []
        for own, weight in zip(tensor.runs, shift.runs, strict=True):
            wide = self._wide(own, 0, own.count, tensor, source)
            for first, count in _cut(weight, shift.columns):
                rows = _merge(weight, first, count, source)[0]
                wide[first : first + count] += (rows @ self._vector(shift.vector, shift.columns, rows.dtype)).astype(
                    wide.dtype
                ) * weight.scale
            parts.append(wide)
        return _rounded(np.concatenate(parts), tensor)

    def _wide(self, run: Run, first: int, count: int, tensor: TranslatedTensor, source: "_StridedReader") -> Array:
        """The rows of a run in the accumulation dtype; the squared merging error is added to the tensor's total."""
        if not run.sources:
            return np.full((count, *tensor.shape[1:]), run.fill, accumulation_dtype(DTYPES[tensor.dtype]))
        wide, heads = _merge(run, first, count, source)
        if heads is not None:
            norm = float(np.einsum("hn,hn->", heads, heads))
            if (
                not np.isfinite(norm) and not np.isfinite(heads).all()
            ):  # a float32 sum of squares may overflow where every number is finite
                raise NonFiniteError(
                    f"tensor {run.sources[0].tensor} holds NaN or Inf, which would spread to every merged head: repair the checkpoint first"
                )
            heads -= wide.astype(DTYPES[tensor.dtype]).astype(wide.dtype).reshape(1, -1)
            before = self._squares.get(tensor.name, (0.0, 0.0))
            self._squares[tensor.name] = (before[0] + float(np.einsum("hn,hn->", heads, heads)), before[1] + norm)
        if run.scale != 1.0:
            wide *= run.scale
        return wide

    def _vector(self, name: str, count: int, wide: np.dtype[Any]) -> Array:
        """A norm's gain or bias. Only the last four are cached, because a layer's vectors are used block after block
        and those of earlier layers never again.
        """
        if name not in self._vectors:
            while len(self._vectors) >= 4:
                del self._vectors[next(iter(self._vectors))]
            self._vectors[name] = np.array(self._read(name, 0, count))
        vector = self._vectors[name].astype(wide)
        if not np.isfinite(vector).all():
            raise NonFiniteError(f"tensor {name} holds NaN or Inf: repair the checkpoint first")
        return vector

    def _strided_reader(self, tensor: TranslatedTensor) -> "_StridedReader":
        return _StridedReader(self._read, tensor.shape[1] if tensor.transposed else None)


class _StridedReader:
    """Reads strided rows of a source tensor, or strided columns of a transposed one, which it keeps in memory."""

    def __init__(self, read: Reader, columns: int | None) -> None:
        self._read = read
        self._columns = columns
        self._held: tuple[str, Array] | None = None

    def __call__(self, rows: Rows, first: int, count: int) -> Array:
        """Rows `first` to `first + count` of a run."""
        start, span = rows.first + first * rows.step, (count - 1) * rows.step + 1
        if self._columns is None:
            return self._read(rows.tensor, start, span)[:: rows.step]
        if self._held is None or self._held[0] != rows.tensor:
            self._held = (rows.tensor, self._read(rows.tensor, 0, self._columns))
        return self._held[1].T[start : start + span : rows.step]


def _cut(run: Run, columns: int) -> Iterator[tuple[int, int]]:
    """(first row, number of rows) of each block of a run."""
    step = max(1, _BLOCK_NUMBERS // (max(1, columns) * max(1, len(run.sources))))
    for first in range(0, run.count, step):
        yield first, min(step, run.count - first)


def _merge(run: Run, first: int, count: int, source: _StridedReader) -> tuple[Array, Array | None]:
    """The merged rows and, if several heads are merged, those heads as [heads, numbers]; both in the accumulation
    dtype.

    This does not round the result.
    """
    rows = source(run.sources[0], first, count)
    wide = accumulation_dtype(rows.dtype)
    if run.pooling is None:
        return rows.astype(wide, order="C"), None
    heads = np.empty((len(run.sources), rows.size), wide)
    heads[0] = rows.reshape(-1)
    for head, place in zip(heads[1:], run.sources[1:], strict=True):
        head[:] = source(place, first, count).reshape(-1)
    return pool(heads, run.pooling).reshape(rows.shape), heads


def _rounded(wide: Array, tensor: TranslatedTensor) -> Array:
    with np.errstate(over="ignore"):
        result = wide.astype(DTYPES[tensor.dtype])
    if not np.isfinite(result).all():
        if np.isfinite(wide).all():
            raise NonFiniteError(
                f"tensor {tensor.name} would hold numbers too large for {tensor.dtype} once the preceding norm is folded into it: "
                "save the model as bfloat16 or float32 first"
            )
        raise NonFiniteError(f"tensor {tensor.name} is computed from NaN or Inf: repair the checkpoint first")
    return result
