"""Markdown from names and texts of files that may hold anything: nothing in them becomes markup."""

import html
import math
import re
from collections.abc import Sequence

from gqa_convert.measuring.results.fields import printable

_LONGEST = 600
_FOLDERS = re.compile(r"""(?<![^\s'"=,:(\[])(?:~[\w.-]*)?/(?:[^/\s'"]+/)*(?=[^/\s'"])""")
"""The folders of an absolute path: a published card must not reveal them."""
_MARKUP = re.compile(r"([\\`*_{}\[\]#|~!$])")


class Markdown(str):
    """Text that is Markdown already and must not be escaped again."""

    __slots__ = ()


def code(text: str) -> Markdown:
    """The text as a code span on one line, in which nothing is markup."""
    line = _line(text)
    fence = "`" * (_longest_run(line) + 1)
    pad = " " if line.startswith(("`", " ")) or line.endswith(("`", " ")) or not line else ""
    return Markdown(f"{fence}{pad}{line}{pad}{fence}")


def plain(text: str) -> Markdown:
    """The text as running text on one line, in which nothing is markup, without the folders of absolute paths."""
    return Markdown(_MARKUP.sub(r"\\\1", html.escape(_line(text), quote=False)))


def fenced(text: str, language: str = "") -> list[str]:
    """The lines of a code block whose fence is longer than every run of backticks in the text."""
    text = without_folders(text)
    fence = "`" * max(3, _longest_run(text) + 1)
    return [f"{fence}{language}", *text.split("\n"), fence]


def without_folders(text: str) -> str:
    """The text with every absolute path reduced to its last name."""
    return _FOLDERS.sub("", text)


def folders_in(text: str) -> str | None:
    """The folders of the first absolute path, None if the text has none."""
    match = _FOLDERS.search(text)
    return match[0] if match else None


def some(names: Sequence[str]) -> str:
    """The first four names and the number of the others, for a message."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table without its empty columns; the first column is left-aligned, the others right-aligned.

    Cells that are not `Markdown` are escaped.
    """
    kept = [number for number in range(len(header)) if number == 0 or any(row[number] for row in rows)]
    lines = [[header[number] for number in kept], ["---" if number == 0 else "---:" for number in kept]]
    lines += [[_cell(row[number]) for number in kept] for row in rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def number(value: float | None, digits: int) -> str:
    """A number with `digits` decimals, or an empty string for None."""
    return "" if value is None else f"{value:,.{digits}f}"


def significant(value: float | None, digits: int = 4) -> str:
    """A number with so many significant digits, or an empty string for None; whole digits are never dropped."""
    return "" if value is None else f"{value:,.{_decimals(value, digits)}f}"


def with_error(value: float | None, error: float | None) -> str:
    """A number and its standard error, each where it is known, both as far as two digits of the error reach."""
    if value is None or not error:
        return significant(value)
    decimals = _decimals(error, 2)
    return f"{value:,.{decimals}f} ± {error:.{decimals}f}"


def _decimals(value: float, digits: int) -> int:
    """The decimals of a number with so many significant digits, at most five."""
    if not value or not math.isfinite(value):
        return digits - 1
    return min(5, max(0, digits - 1 - math.floor(math.log10(abs(value)))))


def _line(text: str) -> str:
    text = without_folders(text)
    return printable(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}...")


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall(r"`+", text)), default=0)


def _cell(text: str) -> str:
    """A cell's text with its bars escaped, since a bar ends a cell even within a code span.

    A bar after an odd number of backslashes is escaped already.
    """
    markdown = text if isinstance(text, Markdown) else plain(text)
    return re.sub(r"(?<!\\)((?:\\\\)*)\|", r"\1\\|", markdown)
