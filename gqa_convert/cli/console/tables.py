"""Tables that fit their terminal: where the columns do not, every row becomes lines of names and values."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .screen import stdout_console, styled

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_GAP = 2
"""Characters between two columns."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        heading: its heading, which may wrap between words.
        justify: the side on which cells are aligned.
        folds_to: characters to which long cells may be folded; None for cells that are never broken.
    """

    heading: str
    justify: Literal["left", "right"] = "left"
    folds_to: int | None = None


def show_table(columns: Sequence[Column | str], rows: Sequence[Sequence["str | Text"]], *, title: str = "") -> None:
    """Print a table on stdout, or one block of names and values per row if the terminal is too narrow for it."""
    from rich import box
    from rich.table import Table

    declared = [Column(column) if isinstance(column, str) else column for column in columns]
    cells = [[styled(cell) for cell in row] for row in rows]
    console = stdout_console()
    if title:
        console.print(title, soft_wrap=True)
    longest = [max((row[place].cell_len for row in cells), default=0) for place in range(len(declared))]
    widths = _widths(declared, longest, console.width - _GAP * len(declared) - 1)
    if widths is None:
        for row in cells:
            _show_block(console, declared, row)
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, _GAP - 1, 0, 0))
    for column, width in zip(declared, widths, strict=True):
        heading = "\n".join(textwrap.wrap(column.heading, max(1, width)))
        table.add_column(heading, justify=column.justify, width=width, overflow="fold")
    for row in cells:
        table.add_row(*row)
    console.print(table)


def _widths(columns: Sequence[Column], longest: Sequence[int], available: int) -> list[int] | None:
    """Return a width for each column, or None if the columns need more than the available characters.

    Args:
        columns: the columns.
        longest: characters of the longest cell of each column.
        available: characters for all columns together.
    """
    folded = [
        cell if column.folds_to is None else min(cell, column.folds_to)
        for column, cell in zip(columns, longest, strict=True)
    ]
    widths = [max([cell, *map(len, column.heading.split())]) for column, cell in zip(columns, folded, strict=True)]
    spare = available - sum(widths)
    if spare < 0:
        return None
    for place, column in enumerate(columns):
        wanted = max(longest[place], len(column.heading)) - widths[place]
        given = min(wanted, spare)
        widths[place] += given
        spare -= given
    return widths


def _show_block(console: "Console", columns: Sequence[Column], row: "Sequence[Text]") -> None:
    """Print a row: its first cell, then the other cells with their headings on indented lines, none of them broken."""
    first, *others = (
        styled(f"{column.heading} " if column.heading else "", cell)
        for column, cell in zip(columns, row, strict=True)
        if cell.cell_len
    )
    console.print(first, soft_wrap=True)
    for line in _lines(others, console.width - _GAP):
        console.print(styled(" " * _GAP, *line), soft_wrap=True)


def _lines(parts: "Sequence[Text]", width: int) -> "Iterator[list[str | Text]]":
    """Distribute parts over lines of at most `width` characters, with two spaces between them."""
    line: list[str | Text] = []
    used = 0
    for part in parts:
        if line and used + _GAP + part.cell_len > width:
            yield line
            line, used = [], 0
        if line:
            line.append(" " * _GAP)
            used += _GAP
        line.append(part)
        used += part.cell_len
    if line:
        yield line
