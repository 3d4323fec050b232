"""Markdown made of names and texts that nobody vouches for: whatever they hold, they stay what they are."""

import re
from collections.abc import Sequence

from gqa_convert.reporting.fields import printable

_LONGEST = 600


def code(text: str) -> str:
    """The text as a code span, in which nothing is markup, on one line."""
    line = printable(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}...")
    fence = "`" * (_longest_run(line) + 1)
    pad = " " if line.startswith(("`", " ")) or line.endswith(("`", " ")) or not line else ""
    return f"{fence}{pad}{line}{pad}{fence}"


def plain(text: str) -> str:
    """The text as running text on one line: punctuation that could be markup is escaped."""
    line = printable(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}...")
    return re.sub(r"([\\`*_{}\[\]<>#|~&!])", r"\\\1", line)


def fenced(text: str, language: str = "") -> list[str]:
    """The lines of a code block, which no line of the text can end."""
    fence = "`" * max(3, _longest_run(text) + 1)
    return [f"{fence}{language}", *text.split("\n"), fence]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table, its first column to the left and all others to the right; empty columns are left out."""
    kept = [number for number in range(len(header)) if number == 0 or any(row[number] for row in rows)]
    lines = [[header[number] for number in kept], ["---" if number == 0 else "---:" for number in kept]]
    lines += [[_cell(row[number]) for number in kept] for row in rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def number(value: float | None, digits: int = 4, unit: str = "") -> str:
    """A figure with so many digits behind the point, or nothing."""
    return "" if value is None else f"{value:,.{digits}f}{unit}"


def with_error(value: float | None, error: float | None, digits: int = 4) -> str:
    """A figure and its standard error, as far as they are there."""
    return number(value, digits) + (f" ± {error:.{digits}f}" if value is not None and error is not None else "")


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall(r"`+", text)), default=0)


def _cell(text: str) -> str:
    """A cell's text, whose bars would end it even within a code span."""
    return re.sub(r"(?<!\\)\|", r"\\|", text)
