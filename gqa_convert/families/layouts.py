"""How heads lie inside a tensor: exact, and exactly reversible, cuts of the axis that counts them.

A layout is a list of sections, in the order in which the converted tensor holds them: queries, keys, values. Each head
of a section is a run of consecutive rows; only where it starts differs between layouts. Shape legend: H query heads, K
K/V heads, c head width, d model width; a projection is [rows, d] (Conv1D stores its transpose), its bias [rows].
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Role = Literal["query", "key", "value", "key_norm", "output"]

FusedLayout = Literal["blocks", "grouped", "quarters"]
"""Order of a fused projection's rows. blocks: [q | k | v], every head of one behind the other. grouped: for each K/V
head its query heads, its key, its value; at K = H that is [q, k, v] per head. quarters: four times [q | v | k], each
with a quarter of the heads (CodeGen)."""


@dataclass(frozen=True, slots=True)
class Section:
    """The heads of one role: `width` rows each, from the rows `starts` on. Sections with `merged` false keep their
    heads.
    """

    role: Role
    width: int
    starts: tuple[int, ...]
    merged: bool

    @property
    def heads(self) -> int:
        return len(self.starts)

    @property
    def rows(self) -> int:
        return self.heads * self.width


def separate(role: Role, heads: int, width: int) -> tuple[Section, ...]:
    """A projection of its own: [K * c, d]."""
    return (Section(role, width, tuple(range(0, heads * width, width)), merged=True),)


def fused(layout: FusedLayout, heads: int, kv_heads: int, width: int) -> tuple[Section, ...]:
    """One projection for all three: [(H + 2 K) * c, d]. With `heads` 0 it holds keys and values only, as for
    cross-attention.
    """
    query: list[Role] = ["query"]
    key: list[Role] = ["key"]
    value: list[Role] = ["value"]
    if layout == "blocks":
        cells = query * heads + key * kv_heads + value * kv_heads
    elif layout == "grouped":
        cells = (query * (heads // kv_heads) + key + value) * kv_heads
    else:
        cells = (query * (heads // 4) + value * (kv_heads // 4) + key * (kv_heads // 4)) * 4
    return tuple(
        Section(
            role, width, tuple(cell * width for cell, held in enumerate(cells) if held == role), merged=role != "query"
        )
        for [role] in ([query, key, value] if heads else [key, value])
    )


def split(array: npt.NDArray[Any], sections: tuple[Section, ...]) -> list[npt.NDArray[Any]]:
    """Each section's heads, [heads, width, ...], copied out of [rows, ...].

    Raises:
        ValueError: the sections do not tile the leading axis.
    """
    if sum(section.rows for section in sections) != array.shape[0]:
        raise ValueError(
            f"sections of {[section.rows for section in sections]} rows do not tile an axis of {array.shape[0]}"
        )
    return [np.stack([array[start : start + section.width] for start in section.starts]) for section in sections]


def join(heads: list[npt.NDArray[Any]], sections: tuple[Section, ...]) -> npt.NDArray[Any]:
    """The inverse of `split`."""
    array = np.empty((sum(section.rows for section in sections), *heads[0].shape[2:]), heads[0].dtype)
    for section, own in zip(sections, heads, strict=True):
        for start, head in zip(section.starts, own, strict=True):
            array[start : start + section.width] = head
    return array
