"""What a translation consists of: where every row of every tensor of the result comes from.

Shape legend: H heads of the source, N K/V heads of the result, c head_dim, d hidden_size; a linear weight is [rows,
columns].
"""

from dataclasses import dataclass
from typing import Protocol

from gqa_convert.checkpoint.dtypes import DTYPES
from gqa_convert.families.layouts import Role
from gqa_convert.families.target_architectures import TargetArchitecture
from gqa_convert.merging.methods import Pooling

Shape = tuple[int, ...]


class Described(Protocol):
    """What a header tells of a tensor."""

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
    """How several sources are merged."""
    role: Role | None = None
    """Of what is merged; random numbers are drawn with the deviation of a role's rows."""
    scale: float = 1.0
    fill: float = 0.0


@dataclass(frozen=True, slots=True)
class Shift:
    """Added to a bias: the rows of the weight that it belongs to, each times `vector` (the bias of the norm in
    front).
    """

    runs: tuple[Run, ...]
    """The weight's, run for run as long as the bias's own."""
    vector: str
    columns: int


@dataclass(frozen=True, slots=True)
class Merged:
    """A tensor whose K/V heads become fewer, as a plan describes it, in the target architecture's layout."""

    roles: tuple[Role, ...]
    before: Shape
    after: Shape
    method: str
    """mean, first, random, or copy where the count stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslatedTensor:
    """A tensor of the result: its runs, top to bottom, and what is done to all of them in the accumulation type."""

    name: str
    dtype: str
    shape: Shape
    runs: tuple[Run, ...]
    place: str
    """The source tensor in whose file and order it belongs."""
    gain: str | None = None
    """A vector of the source that the columns are multiplied with."""
    shift: Shift | None = None
    transposed: bool = False
    merged: Merged | None = None

    @property
    def nbytes(self) -> int:
        count = DTYPES[self.dtype].itemsize if self.dtype in DTYPES else 0
        for size in self.shape:
            count *= size
        return count

    @property
    def copied_ranges(self) -> tuple[tuple[str, int, int], ...] | None:
        """(tensor, first row, rows) for each run, if all that happens is that rows are copied in order; else None."""
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
    """One attention module of the result; `kv_heads` counts the source's."""

    module: str
    kv_heads: int
    key_head_dim: int
    value_head_dim: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Translation:
    """All tensors of the result, and the buffers of the source that nothing reads."""

    target_architecture: TargetArchitecture
    groups: int
    tensors: tuple[TranslatedTensor, ...]
    layers: tuple[TranslatedAttention, ...]
    dropped: tuple[str, ...]
