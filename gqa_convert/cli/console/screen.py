"""The consoles on stdout and stderr, the JSON object on stdout, notes, tables drawn by rich, and
progress on stderr.
"""

import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

if TYPE_CHECKING:
    from rich.console import Console

    from gqa_convert.runtime.json_objects import JsonObject


_WIDTH = 120
"""Columns of a table in a file or a pipe, unless the environment states COLUMNS."""


def make_console(*, stderr: bool = False) -> "Console":
    """Return the console for results on stdout, or for progress and notes on stderr. Lines are not
    wrapped.
    """
    from rich.console import Console

    class Literal(Console):
        """Prints every string literally, because file names may look like markup or emoji codes."""

        def on_broken_pipe(self) -> None:
            abandon(sys.stderr if self.stderr else sys.stdout)

    console = Literal(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)
    if not console.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        console.width = _WIDTH
    return console


def say(line: str) -> None:
    """Print a line of results on stdout."""
    make_console().print(line)


def print_note(text: str) -> None:
    """Print a note on stdout."""
    say(f"note: {text}")


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
    """Let stdout and stderr accept any character in any encoding, and replace streams that the
    caller has closed.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
        stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, stream)


def abandon(stream: Any) -> None:
    """Discard what is still written to a stream whose reader, such as a pager, has exited."""
    # ValueError: the stream has no file descriptor
    with suppress(OSError, ValueError), Path(os.devnull).open("wb") as devnull:
        os.dup2(devnull.fileno(), stream.fileno())


def show_table(
    title: str, rows: Sequence[Mapping[str, str]], justify: Literal["left", "right"] = "right"
) -> None:
    """Print a table on stdout. On a terminal that is too narrow for it, each cell becomes a line.

    Args:
        title: printed above the table.
        rows: the cells by the headings of their columns, which are the same in all rows.
        justify: the side on which cells are aligned; those of the first column always on the left.
    """
    from rich import box
    from rich.table import Table

    console = make_console()
    console.print(title)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in rows[0]:
        table.add_column(heading, justify=justify)
    table.columns[0].justify = "left"
    for row in rows:
        table.add_row(*row.values())
    unlimited = console.options.update(width=10_000)
    if console.measure(table, options=unlimited).maximum <= console.width:
        console.print(table, soft_wrap=False)
        return
    for row in rows:
        cells = [f"{heading} {cell}".strip() for heading, cell in row.items() if cell]
        console.print("\n  ".join(cells))


def show_done(title: str, rows: Mapping[str, str]) -> None:
    """Print what was done, and a line for each label and its text."""
    say(f"done  {title}")
    width = max(map(len, rows))
    for label, text in rows.items():
        say(f"      {label:<{width}}  {text}")


SECONDS = 30.0
"""Between two lines about progress where there is no terminal."""
_PACE_SECONDS = 3600.0
"""The time over which the pace of work is measured: a step may take minutes."""


class ProgressScreen:
    """Shows how far work is, and the time left at its pace: in bars on a terminal, else in lines.
    A closed terminal or a broken pipe does not end the work.
    """

    def __init__(self) -> None:
        from rich.progress import (
            BarColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeRemainingColumn,
        )
        from rich.table import Column

        self._on_terminal = sys.stderr.isatty()
        self._console = make_console(stderr=True)
        self._console.soft_wrap = False  # bars are cut to the width of the terminal
        folded = Column(overflow="fold")
        # bars that are disabled still measure the pace
        self._bars = Progress(
            TextColumn("{task.description}", markup=False, table_column=folded),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[detail]}", markup=False, table_column=folded),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            speed_estimate_period=_PACE_SECONDS,
            disable=not self._on_terminal,
        )
        self._tasks: dict[str, Any] = {}
        self._latest: Any = None
        self._ended = threading.Event()

    def say(self, line: str) -> None:
        """Print a line above the bars."""
        with suppress(OSError):
            self._console.print(line, soft_wrap=True)

    def show(self, label: str, done: float, total: float, detail: str = "") -> None:
        """Show that `done` of `total` units of the work named `label` are complete; a bar goes when
        all are.

        Work that an earlier, interrupted process did, which is what `done` says at first, does not
        count for the pace.
        """
        with suppress(OSError):
            if label not in self._tasks:
                self._tasks[label] = len(self._tasks)  # as rich numbers them
                self._bars.add_task(label, total=total, detail=detail)
            self._bars.update(
                self._tasks[label], completed=done, total=total, detail=detail, visible=done < total
            )
        self._latest = self._bars.tasks[self._tasks[label]]

    def tell(self) -> None:
        """Print in a line what was shown last."""
        task = self._latest
        if task and task.total:
            parts = [f"{task.description}: {task.completed / task.total:.1%}"]
            if task.fields["detail"]:
                parts.append(task.fields["detail"])
            if task.time_remaining:
                parts.append(f"{timedelta(seconds=round(task.time_remaining))} left")
            self.say("  ".join(parts))

    def _keep_telling(self) -> None:
        while not self._ended.wait(SECONDS):
            self.tell()

    def __enter__(self) -> Self:
        with suppress(OSError):
            self._bars.start()
        if not self._on_terminal:
            threading.Thread(target=self._keep_telling, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        with suppress(OSError):
            self._bars.stop()
