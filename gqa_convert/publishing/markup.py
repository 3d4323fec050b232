"""Markdown made of names and texts that nobody vouches for: whatever they hold, they stay what they are."""

import re
from collections.abc import Sequence

from gqa_convert.measuring.results.fields import printable

_LONGEST = 600
_FOLDERS = re.compile(r"""(?<![^\s'"=,:(\[])(?:~[\w.-]*)?/(?:[^/\s'"]+/)*(?=[^/\s'"])""")
"""What comes before the last name of an absolute path: strangers need not know how somebody's folders are called."""


def code(text: str) -> str:
    """The text as a code span, in which nothing is markup, on one line."""
    line = _line(text)
    fence = "`" * (_longest_run(line) + 1)
    pad = " " if line.startswith(("`", " ")) or line.endswith(("`", " ")) or not line else ""
    return f"{fence}{pad}{line}{pad}{fence}"


def plain(text: str) -> str:
    """The text as running text on one line: punctuation that could be markup is escaped."""
    line = _line(text)
    return re.sub(r"([\\`*_{}\[\]<>#|~&!])", r"\\\1", line)


def fenced(text: str, language: str = "") -> list[str]:
    """The lines of a code block, which no line of the text can end."""
    text = without_folders(text)
    fence = "`" * max(3, _longest_run(text) + 1)
    return [f"{fence}{language}", *text.split("\n"), fence]


def without_folders(text: str) -> str:
    """The text with absolute paths cut down to their last names."""
    return _FOLDERS.sub("", text)


def folders_in(text: str) -> str | None:
    """The folders of the first absolute path, if there is one."""
    match = _FOLDERS.search(text)
    return match[0] if match else None


def some(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


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


def _line(text: str) -> str:
    text = without_folders(text)
    return printable(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}...")


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall(r"`+", text)), default=0)


def _cell(text: str) -> str:
    """A cell's text, whose bars would end it even within a code span; one after an odd number of backslashes is escaped
    already.
    """
    return re.sub(r"(?<!\\)((?:\\\\)*)\|", r"\1\\|", text)
