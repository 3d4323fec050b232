"""Panels of help: a title in the upper edge, and rows of a name and its description.

They are drawn here because rich, which draws the tables of results, takes as long to import as all the rest of `--help`.
"""

import sys
import textwrap
from collections.abc import Iterator, Sequence

_BOX, _ASCII_BOX = tuple("╭─╮│╰╯"), tuple("+-+|++")
_WIDEST_NAME = 30
"""Characters of the column of names; a longer name has a line to itself."""
_CYAN, _DIM, _RESET = "\x1b[1;36m", "\x1b[2m", "\x1b[0m"


def panel(title: str, rows: Sequence[tuple[str, str]], width: int) -> Iterator[str]:
    """Yield the lines of a panel, coloured; whoever prints them to something else than a terminal removes the colours.

    Args:
        title: shown in the upper edge.
        rows: names and descriptions.
        width: of the panel, in characters.
    """
    left, line, right, side, low_left, low_right = _BOX if _can_print("".join(_BOX)) else _ASCII_BOX
    names = min(_WIDEST_NAME, max(len(name) for name, _ in rows))
    upper = f"{left}{line} {title} "
    yield f"{_DIM}{upper.ljust(width - 1, line)}{right}{_RESET}"
    edge = f"{_DIM}{side}{_RESET}"
    for name, text in rows:
        for first, second in _row(name, text, names, width - names - 6):
            padding = " " * (width - 6 - max(names, len(first)) - len(second))
            yield f"{edge} {_CYAN}{first}{_RESET}{' ' * (names - len(first))}  {second}{padding} {edge}"
    yield f"{_DIM}{low_left}{line * (width - 2)}{low_right}{_RESET}"


def _row(name: str, text: str, names: int, width: int) -> Iterator[tuple[str, str]]:
    """Yield the lines of a row: the name, which only the first has, and a part of the text."""
    lines = textwrap.wrap(text, width, break_on_hyphens=False) or [""]
    if len(name) > names:
        yield name, ""
        name = ""
    for line in lines:
        yield name, line
        name = ""


def _can_print(characters: str) -> bool:
    try:
        characters.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True
