"""How K/V heads lie inside a tensor: exact, and exactly reversible, cuts of the leading axis.

Every layout here keeps a head's rows together and the heads in order along the leading axis, so that a head is one contiguous range of
bytes. Shape legend: H query heads, K K/V heads, c head width, d model width; a projection is [rows, d], its bias [rows].
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Role = Literal["query", "key", "value", "key_norm"]


@dataclass(frozen=True, slots=True)
class Section:
    """A run of rows that belongs to one role: `heads` heads of `width` rows each. Sections with `merged` false stay as they are."""

    role: Role
    heads: int
    width: int
    merged: bool

    @property
    def rows(self) -> int:
        return self.heads * self.width


def separate(role: Role, heads: int, width: int) -> tuple[Section, ...]:
    """A projection of its own: [K * c, d]."""
    return (Section(role, heads, width, merged=True),)


def fused(query_rows: int, heads: int, key_width: int, value_width: int) -> tuple[Section, ...]:
    """One projection [q | k | v]: [query_rows + K * c_k + K * c_v, d]."""
    return (
        Section("query", 1, query_rows, merged=False),
        Section("key", heads, key_width, merged=True),
        Section("value", heads, value_width, merged=True),
    )


def split(array: npt.NDArray[Any], sections: tuple[Section, ...]) -> list[npt.NDArray[Any]]:
    """Views [heads, width, ...] of each section.

    Raises:
        ValueError: the sections do not add up to the leading axis.
    """
    if sum(section.rows for section in sections) != array.shape[0]:
        raise ValueError(f"sections of {[section.rows for section in sections]} rows do not tile an axis of {array.shape[0]}")
    views, row = [], 0
    for section in sections:
        views.append(array[row : row + section.rows].reshape(section.heads, section.width, *array.shape[1:]))
        row += section.rows
    return views


def join(views: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """The inverse of `split`, for any number of heads in each view."""
    return np.concatenate([view.reshape(-1, *view.shape[2:]) for view in views])
