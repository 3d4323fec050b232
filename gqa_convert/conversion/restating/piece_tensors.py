"""Tensors of a checkpoint that is rewritten for another model type, and the ranges of bytes they are made of."""

from dataclasses import dataclass
from math import prod

from gqa_convert.checkpoint.headers import DTYPE_BITS
from gqa_convert.conversion.translation.description import TranslatedTensor


@dataclass(frozen=True, slots=True)
class PieceTensor:
    """A tensor of the result; a piece is the number of a source's file, an offset in it and a number of bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[int, int, int], ...]
    translated: TranslatedTensor | None = None
    unit_rows: bool = False

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * DTYPE_BITS[self.dtype] // 8
