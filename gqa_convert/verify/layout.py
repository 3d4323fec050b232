"""Where the heads of queries, keys and values lie in a projection.

The order of the heads is derived as the models derive it: by reshaping a row of head numbers.
"""

from dataclasses import dataclass
from typing import Literal

from gqa_convert.families.family import Family

Part = Literal["query", "key", "value", "norm"]


@dataclass(frozen=True, slots=True)
class Run:
    """The heads of one part of a tensor: rows of a weight or bias, columns of a transposed weight."""

    part: Part
    head_dim: int
    """Rows (columns) per head."""
    starts: tuple[int, ...]
    """The first row (column) of each head."""

    @property
    def heads(self) -> int:
        """How many heads the part has."""
        return len(self.starts)

    @property
    def merged(self) -> bool:
        """Whether the conversion merges these heads."""
        return self.part != "query"


def separate(part: Part, heads: int, head_dim: int) -> tuple[Run, ...]:
    """The layout of a projection or norm that holds one part: [heads * head_dim, ...]."""
    return (Run(part, head_dim, tuple(head * head_dim for head in range(heads))),)


def fused(layout: str, heads: int, kv_heads: int, head_dim: int) -> tuple[Run, ...]:
    """The layout of a projection that holds queries, keys and values: [(heads + 2 * kv_heads) * head_dim, ...].

    Args:
        layout: `blocks` for [q | k | v]; `grouped` for [q.., k, v] of each K/V head; `quarters` for [q | v | k] four
            times.
        heads: query heads; 0 for a projection of keys and values only.
        kv_heads: K/V heads.
        head_dim: rows per head.

    Returns:
        Queries (if any), keys and values, in this order.
    """
    import numpy as np

    cells = np.arange(heads + 2 * kv_heads)
    if layout == "grouped" and heads:
        table = cells.reshape(kv_heads, heads // kv_heads + 2)
        query, key, value = table[:, :-2], table[:, -2], table[:, -1]
    elif layout == "quarters" and heads:
        query, value, key = cells.reshape(4, 3, heads // 4).swapaxes(0, 1)
    else:
        query, key, value = np.split(cells, (heads, heads + kv_heads))
    parts: tuple[tuple[Part, np.ndarray], ...] = (("query", query), ("key", key), ("value", value))
    return tuple(
        Run(part, head_dim, tuple(int(cell) * head_dim for cell in held.reshape(-1)))
        for part, held in parts
        if held.size
    )


def axis_of(family: Family, shape: tuple[int, ...]) -> int:
    """The axis of a projection's tensor along which its heads lie: the last of a transposed weight, else the first."""
    return 1 if family.transposed and len(shape) == 2 else 0
