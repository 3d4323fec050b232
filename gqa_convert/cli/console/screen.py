"""The consoles on stdout and stderr, the JSON object on stdout, and notes."""

import io
import json
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from gqa_convert.checkpoint.strict_json import JsonObject

_WIDTH = 120
"""Columns of a table in a file or a pipe, unless the environment states COLUMNS."""


def stdout_console() -> "Console":
    """Return the console for results. Lines are not wrapped."""
    return _console(stderr=False)


def stderr_console() -> "Console":
    """Return the console for progress and notes."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> "Console":
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
    (console or stdout_console()).print(f"note: {text}")


def print_json(value: "JsonObject") -> None:
    """Print an object as one line of JSON on stdout.

    Raises:
        OSError: stdout cannot be written, for example because its disk is full.
    """
    text = json.dumps(value, allow_nan=False)
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        abandon(sys.stdout)
    except OSError as problem:
        abandon(sys.stdout)  # otherwise the buffered rest would fail again at exit
        raise OSError(problem.errno, problem.strerror, "stdout") from None


def prepare_streams() -> None:
    """Let stdout and stderr accept any character in any encoding, and replace streams that the caller has closed."""
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def abandon(stream: Any) -> None:
    """Discard what is still written to a stream whose reader, such as a pager, has exited."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(devnull, stream.fileno())
    except (OSError, ValueError):  # the stream has no file descriptor
        pass
    finally:
        os.close(devnull)


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
