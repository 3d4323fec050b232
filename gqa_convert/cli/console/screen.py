"""The consoles on stdout and stderr, the JSON object on stdout, and notes."""

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from gqa_convert.checkpoint.strict_json import JsonObject

_WIDTH = 120
"""Columns of a table in a file or a pipe, unless the environment states COLUMNS."""


def make_console(*, stderr: bool = False) -> "Console":
    """Return the console for results on stdout, or for progress and notes on stderr. Lines are not wrapped."""
    from rich.console import Console

    class Literal(Console):
        """Prints every string literally, because file names may look like markup or emoji codes."""

        def on_broken_pipe(self) -> None:
            abandon(sys.stderr if self.stderr else sys.stdout)

    console = Literal(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)
    if not console.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        console.width = _WIDTH
    return console


def print_note(text: str, console: "Console | None" = None) -> None:
    """Print a note, on stdout unless another console is given."""
    (console or make_console()).print(f"note: {text}")


def print_json(value: "JsonObject") -> None:
    """Print an object as one line of JSON on stdout.

    Raises:
        OSError: stdout cannot be written, for example because its disk is full.
    """
    try:
        print(json.dumps(value, allow_nan=False), flush=True)
    except OSError as problem:
        abandon(sys.stdout)  # otherwise the buffered rest would fail again at exit
        if not isinstance(problem, BrokenPipeError):
            raise OSError(problem.errno, problem.strerror, "stdout") from None


def prepare_streams() -> None:
    """Let stdout and stderr accept any character in any encoding, and replace streams that the caller has closed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
        stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, stream)


def abandon(stream: Any) -> None:
    """Discard what is still written to a stream whose reader, such as a pager, has exited."""
    # ValueError: the stream has no file descriptor
    with suppress(OSError, ValueError), Path(os.devnull).open("wb") as devnull:
        os.dup2(devnull.fileno(), stream.fileno())


def tokens_text(count: int) -> str:
    """Format a number of tokens, with three digits and powers of 1000: 512, 4.1k, 32.8k, 2M."""
    shown = float(count)
    for unit in ("", "k", "M", "B", "T"):  # noqa: B007
        if shown < 999.5:
            break
        shown /= 1000
    if shown >= 100:
        return f"{shown:.0f}{unit}"
    return f"{shown:.1f}".removesuffix(".0") + unit
