"""Tables of results, drawn by rich."""

from collections.abc import Mapping, Sequence
from typing import Literal

from .screen import make_console


def show_table(rows: Sequence[Mapping[str, str]], title: str = "", justify: Literal["left", "right"] = "right") -> None:
    """Print a table on stdout. On a terminal that is too narrow for it, each cell becomes a line.

    Args:
        rows: the cells by the headings of their columns, which are the same in all rows.
        title: printed above the table.
        justify: the side on which cells are aligned; those of the first column always on the left.
    """
    from rich import box
    from rich.table import Table

    console = make_console()
    if title:
        console.print(title)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in rows[0]:
        table.add_column(heading, justify=justify if table.columns else "left", overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    unlimited = console.options.update(width=10_000)
    if console.measure(table, options=unlimited).maximum <= console.width:
        console.print(table, soft_wrap=False)
        return
    for row in rows:
        cells = (f"{heading} {cell}".strip() for heading, cell in row.items() if cell)
        console.print("\n  ".join(cells))


def show_done(title: str, rows: Mapping[str, str]) -> None:
    """Print what was done, and a line for each label and its text."""
    console = make_console()
    console.print(f"done  {title}")
    width = max(map(len, rows))
    for label, text in rows.items():
        console.print(f"      {label:<{width}}  {text}")
