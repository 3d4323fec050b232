"""Tables of results, drawn by rich."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from .screen import stdout_console, styled

if TYPE_CHECKING:
    from rich.text import Text


class Column(NamedTuple):
    """A column of a table: its heading, and the side on which its cells are aligned."""

    heading: str
    justify: Literal["left", "right"] = "left"


def show_table(columns: Sequence[Column | str], rows: Sequence[Sequence["str | Text"]], *, title: str = "") -> None:
    """Print a table on stdout. On a terminal that is too narrow for it, cells are broken over several lines.

    Args:
        columns: of the table; a string is the heading of a column that is aligned on the left.
        rows: the cells of every row, as many as there are columns.
        title: printed above the table.
    """
    from rich import box
    from rich.table import Table

    console = stdout_console()
    if title:
        console.print(title, soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        heading, justify = Column(column) if isinstance(column, str) else column
        table.add_column(heading, justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*(styled(cell) for cell in row))
    console.print(table)


def show_done(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Print what was done, and rows of a label and a text."""
    console = stdout_console()
    console.print(styled(("done", "green"), f"  {title}"), soft_wrap=True)
    width = max(len(label) for label, _ in rows)
    for label, text in rows:
        console.print(f"      {label:<{width}}  {text}", soft_wrap=True)
