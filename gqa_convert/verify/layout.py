"""Where heads lie in a projection, told in the way in which models reshape it: by cutting a row of head numbers."""

from dataclasses import dataclass
from typing import Literal

from gqa_convert.families.table import Family

Part = Literal["query", "key", "value", "norm"]


@dataclass(frozen=True, slots=True)
class Run:
    """The heads of one part: `width` rows each (columns, where a weight is transposed), head by head from `starts`
    on.
    """

    part: Part
    width: int
    starts: tuple[int, ...]

    @property
    def heads(self) -> int:
        return len(self.starts)

    @property
    def merged(self) -> bool:
        return self.part != "query"


def alone(part: Part, heads: int, width: int) -> tuple[Run, ...]:
    """A projection or norm that holds nothing else: [heads * width, ...]."""
    return (Run(part, width, tuple(head * width for head in range(heads))),)


def fused(layout: str, heads: int, kv_heads: int, width: int) -> tuple[Run, ...]:
    """Queries, keys and values in one projection, [(heads + 2 * kv_heads) * width, ...], in OUT's order; without heads,
    keys and values.

    Args:
        layout: `blocks` [q | k | v]; `grouped` [q.., k, v] for each K/V head; `quarters` four times [q | v | k].
        heads: query heads.
        kv_heads: K/V heads.
        width: rows of each.
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
        Run(part, width, tuple(int(cell) * width for cell in held.reshape(-1))) for part, held in parts if held.size
    )


def axis_of(family: Family, shape: tuple[int, ...]) -> int:
    """The axis of a projection's tensor that counts heads: the last one of a transposed weight, the first one else."""
    return 1 if family.transposed and len(shape) == 2 else 0
