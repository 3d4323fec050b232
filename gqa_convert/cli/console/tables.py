"""Tables of results, drawn by rich."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from .screen import stdout_console, styled

if TYPE_CHECKING:
    from rich.text import Text


def show_table(
    columns: Sequence[str],
    rows: Sequence[Sequence["str | Text"]],
    *,
    title: str = "",
    justify: Literal["left", "right"] = "right",
) -> None:
    """Print a table on stdout. On a terminal that is too narrow for it, cells are broken over several lines.

    Args:
        columns: their headings.
        rows: the cells of every row, as many as there are columns.
        title: printed above the table.
        justify: the side on which cells are aligned; those of the first column always on the left.
    """
    from rich import box
    from rich.table import Table

    console = stdout_console()
    if title:
        console.print(title)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(columns[0], overflow="fold")
    for heading in columns[1:]:
        table.add_column(heading, justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*map(styled, row))
    console.print(table, soft_wrap=False)


def show_columns(columns: Mapping[str, Sequence[str]], *, title: str = "") -> None:
    """Print a table of cells by the heading of their column."""
    show_table(list(columns), list(zip(*columns.values(), strict=True)), title=title)


def show_done(title: str, rows: Mapping[str, str]) -> None:
    """Print what was done, and a line for each label and its text, which may have several lines."""
    console = stdout_console()
    console.print(styled(("done", "green"), f"  {title}"))
    width = max(map(len, rows))
    for label, text in rows.items():
        for line in text.splitlines():
            console.print(f"      {label:<{width}}  {line}")
