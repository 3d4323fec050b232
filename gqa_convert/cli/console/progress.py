"""Progress on stderr: bars on a terminal, elsewhere a plain line every 30 seconds."""

import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, Self

from .screen import make_console

SECONDS = 30.0
"""Between two lines about progress where there is no terminal."""
_PACE_SECONDS = 3600.0
"""The time over which the pace of work is measured: a step may take minutes."""


class ProgressScreen:
    """Shows how far work is, and the time left at its pace. A closed terminal or a broken pipe does not end the work."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
        from rich.table import Column

        self.on_terminal = sys.stderr.isatty()
        self._console = make_console(stderr=True)
        self._console.soft_wrap = False  # bars are cut to the width of the terminal
        # bars that are disabled still measure the pace
        self._bars = Progress(
            TextColumn("{task.description}", markup=False, table_column=Column(overflow="fold")),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[detail]}", markup=False, table_column=Column(overflow="fold")),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            speed_estimate_period=_PACE_SECONDS,
            disable=not self.on_terminal,
        )
        self._tasks: dict[str, Any] = {}
        self._latest = ("", 0.0, 0.0, "")
        self._line_shown = time.monotonic()
        self._lock, self._ended = threading.Lock(), threading.Event()

    def say(self, line: str) -> None:
        """Print a line above the bars."""
        with suppress(OSError):
            self._console.print(line, soft_wrap=True)

    def show(self, label: str, done: float, total: float, detail: str = "") -> None:
        """Show that `done` of `total` units of the work named `label` are complete; a bar goes when all are.

        Work that an earlier, interrupted process did, which is what `done` says at first, does not count for the pace.
        """
        with suppress(OSError):
            if label not in self._tasks:
                self._tasks[label] = len(self._tasks)  # as rich numbers them
                self._bars.add_task(label, total=total, detail=detail)
            self._bars.update(self._tasks[label], completed=done, total=total, detail=detail, visible=done < total)
        self._latest = (label, done, total, detail)
        self._show_line()

    def _show_line(self) -> None:
        """Print where the work is, if that is due and there are no bars."""
        with self._lock:
            label, done, total, detail = self._latest
            if self.on_terminal or not total or time.monotonic() - self._line_shown < SECONDS:
                return
            self._line_shown = time.monotonic()
            seconds = self._bars.tasks[self._tasks[label]].time_remaining
            left = f"{timedelta(seconds=round(seconds))} left" if seconds else ""
            self.say("  ".join(filter(None, [f"{label}: {done / total:.1%}", detail, left])))

    def _remind(self) -> None:
        """Print it again while a long step says nothing."""
        while not self._ended.wait(max(1.0, self._line_shown + SECONDS - time.monotonic())):
            self._show_line()

    def __enter__(self) -> Self:
        with suppress(OSError):
            self._bars.start()
        if not self.on_terminal:
            threading.Thread(target=self._remind, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        with suppress(OSError):
            self._bars.stop()
