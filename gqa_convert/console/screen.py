"""The console on stderr, the one object on stdout, and how sizes are written."""

import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def stderr_console() -> "Console":
    from rich.console import Console

    class Patient(Console):
        def on_broken_pipe(self) -> None:
            """Nobody reads any more, which is no reason to end the program."""

    console = Patient(stderr=True, highlight=False)
    if not console.is_terminal:
        console.width = 120  # files and pipes have no width; long lines must not break names apart
    return console


def print_json(value: dict[str, Any]) -> None:
    """The one JSON object on stdout."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n")
    sys.stdout.flush()


def size(nbytes: float) -> str:
    """Bytes as people read them: 1.2 GB, 98.3 kB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(nbytes) < 1000 or unit == "GB":
            return f"{nbytes:,.0f} {unit}" if unit == "bytes" else f"{nbytes:,.1f} {unit}"
        nbytes /= 1000
    raise AssertionError
