"""How heads lie inside a tensor: exact and exactly reversible divisions of the axis that counts
them.

A layout is a list of sections, in the order in which the converted tensor holds them: queries,
keys, values. Each head of a section is a run of consecutive rows; layouts differ only in where the
runs start. Shape legend: H query heads, K K/V heads, c head_dim, d hidden size. A projection is
[rows, d] (Conv1D stores its transpose), its bias [rows].
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy.typing as npt

Role = Literal["query", "gate", "key", "value", "key_norm"]

FusedLayout = Literal["blocks", "grouped"]
"""Order of a fused projection's rows.

blocks: [q | k | v], one block of all heads for each. grouped: for each K/V head its query heads,
its key and its value; with K = H that is [q, k, v] per head.
"""


class Section(NamedTuple):
    """The heads of one role: `head_rows` rows each, the first of which are `starts`."""

    role: Role
    head_rows: int
    """Rows of one head: head_dim for a projection, twice that for queries with a gate, 1 for a gain
    per head.
    """
    starts: tuple[int, ...]

    @property
    def merged(self) -> bool:
        """Whether conversion merges the heads."""
        return self.role in ("key", "value", "key_norm")

    @property
    def heads(self) -> int:
        return len(self.starts)

    @property
    def rows(self) -> int:
        return self.heads * self.head_rows


Sections = tuple[Section, ...]

_Head = tuple[Role, int]
"""What a head is for, and its number of rows."""


def _in_order(heads: Sequence[_Head]) -> Sections:
    """The layout of heads that follow one another."""
    head_rows = dict(heads)
    starts: dict[Role, list[int]] = {}
    first = 0
    for role, rows in heads:
        starts.setdefault(role, []).append(first)
        first += rows
    return tuple(Section(role, head_rows[role], tuple(starts[role])) for role in starts)


def separate(role: Role, heads: int, head_rows: int) -> Sections:
    """The layout of a separate projection: [heads * head_rows, d]."""
    return _in_order([(role, head_rows)] * heads)


def queries(heads: int, head_rows: int, outputs: int) -> Sections:
    """The layout of the queries' own projection: [heads * head_rows * outputs, d], where each
    head's gate, if there are more outputs than one, follows it.
    """
    one: list[_Head] = [("query", head_rows), ("gate", head_rows * (outputs - 1))]
    return _in_order(one[:outputs] * heads)


def fused(layout: FusedLayout, heads: int, kv_heads: int, head_dim: int) -> Sections:
    """The layout of one projection for all three roles: [(H + 2 K) * c, d].

    Args:
        layout: order of the rows.
        heads: H; 0 for cross-attention, whose fused projection holds only keys and values.
        kv_heads: K.
        head_dim: c.
    """
    repeats = kv_heads if layout == "grouped" else 1
    counts: dict[Role, int] = {"query": heads, "key": kv_heads, "value": kv_heads}
    return _in_order(
        [(role, head_dim) for role in counts for _ in range(counts[role] // repeats)] * repeats
    )


def regrouped(sections: Sections, kv_heads: int) -> Sections:
    """The layout of the converted tensor: section behind section, those that are merged with
    `kv_heads` heads. Where no number changes, it is the source's.

    Args:
        sections: the source's layout.
        kv_heads: K/V heads of the result.
    """
    if all(section.heads == kv_heads for section in sections if section.merged):
        return sections
    heads: list[_Head] = []
    for section in sections:
        heads += [(section.role, section.head_rows)] * (
            kv_heads if section.merged else section.heads
        )
    return _in_order(heads)


def split(array: Any, sections: Sections) -> list[Any]:
    """Each section's heads, [heads, head_rows, ...], from an array [rows, ...]."""
    return [array[row_numbers(section)] for section in sections]


def join(heads: Sequence[Any], sections: Sections) -> Any:
    """The inverse of `split`, for arrays of any library."""
    import numpy as np
    from array_api_compat import array_namespace, device

    xp = array_namespace(*heads)
    one_behind_another = xp.concat([own.reshape(-1, *own.shape[2:]) for own in heads], axis=0)
    places = np.concatenate([row_numbers(section).reshape(-1) for section in sections])
    if (np.diff(places) == 1).all():
        return one_behind_another
    numbers = xp.asarray(np.argsort(places), device=device(one_behind_another))
    return xp.take(one_behind_another, numbers, axis=0)


def row_numbers(section: Section) -> "npt.NDArray[Any]":
    """The numbers of the rows of each head, [heads, head_rows]."""
    import numpy as np  # plans, which need none of this, do without

    return np.add.outer(section.starts, np.arange(section.head_rows))
