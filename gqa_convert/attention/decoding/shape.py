"""What a decoding kernel is compiled for, its arguments, and the memory it needs."""

from dataclasses import dataclass
from typing import Final, Literal

BLOCK: Final = 128
"""Keys between two corrections of the softmax; a multiple of the lanes."""

FIELDS: Final = (
    *("query", "key", "value", "out", "mask", "partial", "counters"),  # addresses
    *("keys", "chunk", "chunks", "tasks", "heads", "queries", "scale"),  # scale is the bits of a float64
    *("key_batch", "key_head", "key_row", "value_batch", "value_head", "value_row"),  # strides in bytes
    *("mask_batch", "mask_head", "mask_query"),
)
"""The kernel's arguments, 64 bits each."""

MaskKind = Literal["none", "bool", "float"]


@dataclass(frozen=True, slots=True)
class Shape:
    """What a kernel is compiled for.

    Attributes:
        dtype: "float32", "bfloat16" or "float16", of queries, keys, values and output.
        rows: query heads of a group times queries.
        ratio: query heads of a group.
        head_dim: features of queries and keys, a multiple of `lanes`.
        value_head_dim: features of values, a multiple of `lanes`.
        mask: what "mask" points to, [.., keys] without gaps: nothing; bytes, 0 where a key is hidden; or float32, added to the
            scores.
        per_row: the mask differs between heads or queries.
        lanes: float32 numbers of a vector register, 8 or 16.
        pairs: the processor multiplies pairs of bfloat16.
    """

    dtype: str
    rows: int
    ratio: int
    head_dim: int
    value_head_dim: int
    mask: MaskKind
    per_row: bool
    lanes: int
    pairs: bool


def tile_of(rows: int, lanes: int) -> int:
    """Rows in a vector of scores: up to half the lanes."""
    return next((size for size in (2, 4) if rows <= size), 8) if lanes == 16 else (2 if rows <= 2 else 4)


def partial_bytes(rows: int, value_head_dim: int, lanes: int) -> int:
    """Memory for what a chunk leaves: greatest scores, sums of weights, results."""
    return 8 * lanes * -(-rows // tile_of(rows, lanes)) + 4 * rows * value_head_dim
