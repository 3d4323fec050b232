"""How heads lie inside a tensor: exact and exactly reversible divisions of the axis that counts them.

A layout is a list of sections, in the order in which the converted tensor holds them: queries, keys, values. Each head
of a section is a run of consecutive rows; layouts differ only in where the runs start. Shape legend: H query heads, K
K/V heads, c head_dim, d hidden size. A projection is [rows, d] (Conv1D stores its transpose), its bias [rows].
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy.typing as npt

Role = Literal["query", "gate", "key", "value", "key_norm", "output"]

FusedLayout = Literal["blocks", "grouped", "quarters"]
"""Order of a fused projection's rows.

blocks: [q | k | v], one block of all heads for each. grouped: for each K/V head its query heads, its key and its value;
with K = H that is [q, k, v] per head. quarters: four times [q | v | k], each with a quarter of the heads (CodeGen).
"""


@dataclass(frozen=True, slots=True)
class Section:
    """The heads of one role: `head_rows` rows each, the first of which are `starts`."""

    role: Role
    head_rows: int
    """Rows of one head: head_dim for a projection, twice that for queries with a gate, 1 for a gain per head."""
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


def separate(role: Role, heads: int, head_rows: int) -> Sections:
    """The layout of a separate projection: [heads * head_rows, d]."""
    return (Section(role, head_rows, tuple(range(0, heads * head_rows, head_rows))),)


def queries(heads: int, head_rows: int, outputs: int) -> Sections:
    """The layout of the queries' own projection: [heads * head_rows * outputs, d], where each head's gate, if there are
    more outputs than one, follows it.
    """
    starts = range(0, heads * head_rows * outputs, head_rows * outputs)
    query = Section("query", head_rows, tuple(starts))
    if outputs == 1:
        return (query,)
    return query, Section("gate", head_rows * (outputs - 1), tuple(start + head_rows for start in starts))


def fused(layout: FusedLayout, heads: int, kv_heads: int, head_dim: int) -> Sections:
    """The layout of one projection for all three roles: [(H + 2 K) * c, d].

    Args:
        layout: order of the rows.
        heads: H; 0 for cross-attention, whose fused projection holds only keys and values.
        kv_heads: K.
        head_dim: c.
    """
    repeats = {"blocks": 1, "grouped": kv_heads, "quarters": 4}[layout]
    counts: dict[Role, int] = {"query": heads, "key": kv_heads, "value": kv_heads}
    order: tuple[Role, ...] = ("query", "value", "key") if layout == "quarters" else ("query", "key", "value")
    roles = [role for role in order for _ in range(counts[role] // repeats)] * repeats
    starts = {role: tuple(number * head_dim for number, other in enumerate(roles) if other == role) for role in counts}
    return tuple(Section(role, head_dim, found) for role, found in starts.items() if found)


def regrouped(sections: Sections, groups: int) -> Sections:
    """The layout of the converted tensor: section behind section, those that are merged with `groups` heads. Where no
    number changes, it is the source's.

    Args:
        sections: the source's layout.
        groups: K/V heads of the result.
    """
    if all(section.heads == groups for section in sections if section.merged):
        return sections
    found: list[Section] = []
    first = 0
    for section in sections:
        end = first + (groups if section.merged else section.heads) * section.head_rows
        found.append(Section(section.role, section.head_rows, tuple(range(first, end, section.head_rows))))
        first = end
    return tuple(found)


def split(array: "npt.NDArray[Any]", sections: Sections) -> "list[npt.NDArray[Any]]":
    """Each section's heads, [heads, head_rows, ...], from an array [rows, ...]: a view where they follow one another, else
    a copy.
    """
    import numpy as np  # plans, which need none of this, do without

    found = []
    for section in sections:
        first, end = section.starts[0], section.starts[-1] + section.head_rows
        if end - first == section.rows:
            found.append(array[first:end].reshape(section.heads, section.head_rows, *array.shape[1:]))
        else:
            found.append(np.stack([array[start : start + section.head_rows] for start in section.starts]))
    return found


def join(heads: "list[npt.NDArray[Any]]", sections: Sections) -> "npt.NDArray[Any]":
    """The inverse of `split`."""
    import numpy as np

    array = np.empty((sum(section.rows for section in sections), *heads[0].shape[2:]), heads[0].dtype)
    for section, own in zip(sections, heads, strict=True):
        for start, head in zip(section.starts, own, strict=True):
            array[start : start + section.head_rows] = head
    return array
