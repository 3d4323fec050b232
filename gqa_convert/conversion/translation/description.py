"""The parts of a translation, which state where every row of every output tensor comes from.

Shape legend: H attention heads of the source, N K/V heads of the result, c head_dim, d hidden_size. A linear weight is
[rows, columns].
"""

from dataclasses import dataclass
from typing import Protocol

from gqa_convert.checkpoint.item_bytes import ITEM_BYTES
from gqa_convert.families.layouts import Role
from gqa_convert.families.target_architectures import TargetArchitecture
from gqa_convert.merging.methods import Pooling

Shape = tuple[int, ...]


class Described(Protocol):
    """The dtype and shape of a tensor, as its header states them."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> Shape: ...


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows `first`, `first + step`, ... of a source tensor (its columns, where the output tensor is `transposed`)."""

    tensor: str
    first: int
    step: int = 1


@dataclass(frozen=True, slots=True)
class Run:
    """`count` consecutive output rows: `fill` everywhere, rows of the source, or the rows of several heads merged into
    one.
    """

    count: int
    sources: tuple[Rows, ...] = ()
    pooling: Pooling | None = None
    """How several sources are merged; None if there is at most one."""
    scale: float = 1.0
    fill: float = 0.0


@dataclass(frozen=True, slots=True)
class Shift:
    """A term added to a bias: the product of each row of the layer's weight with `vector`, the bias of the folded norm."""

    runs: tuple[Run, ...]
    """The runs of the weight; each is as long as the bias's run at the same position."""
    vector: str
    columns: int


@dataclass(frozen=True, slots=True)
class Merged:
    """A tensor whose K/V heads are merged, as the plan lists it, in the target architecture's layout."""

    roles: tuple[Role, ...]
    before: Shape
    after: Shape
    method: str
    """`mean` or `first`, or `copy` if the number of heads stays the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslatedTensor:
    """An output tensor: its runs from top to bottom, and the operations applied to all of them in the accumulation
    dtype.
    """

    name: str
    dtype: str
    shape: Shape
    runs: tuple[Run, ...]
    place: str
    """The source tensor whose file and position the output tensor takes."""
    gain: str | None = None
    """The source vector that scales the columns."""
    shift: Shift | None = None
    transposed: bool = False
    merged: Merged | None = None

    @property
    def nbytes(self) -> int:
        count = ITEM_BYTES.get(self.dtype, 0)
        for size in self.shape:
            count *= size
        return count

    @property
    def copied_ranges(self) -> tuple[tuple[str, int, int], ...] | None:
        """(tensor, first row, number of rows) for each run if the tensor is a plain copy of source rows; otherwise
        None.
        """
        if self.gain or self.shift or self.transposed:
            return None
        ranges = []
        for run in self.runs:
            if len(run.sources) != 1 or run.sources[0].step != 1 or run.scale != 1.0:
                return None
            ranges.append((run.sources[0].tensor, run.sources[0].first, run.count))
        return tuple(ranges)


@dataclass(frozen=True, slots=True)
class TranslatedAttention:
    """One attention module of the result; `kv_heads` is the number of K/V heads in the source."""

    module: str
    kv_heads: int
    key_head_dim: int
    value_head_dim: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Translation:
    """All tensors of the result, and the names of the source's buffers that are dropped."""

    target_architecture: TargetArchitecture
    groups: int
    tensors: tuple[TranslatedTensor, ...]
    layers: tuple[TranslatedAttention, ...]
    dropped: tuple[str, ...]
