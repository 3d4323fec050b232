"""Progress on stderr: bars on a terminal, elsewhere a plain line every 30 seconds."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from .bars import progress_bars, text_column
from .pace import SECONDS, Pace, ProgressLines
from .screen import stderr_console

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from gqa_convert.training.metrics import MetricsLine, StepReport


def _say(line: str) -> None:
    """Print a line on stderr; a closed terminal or a broken pipe does not end the work."""
    with suppress(OSError):
        stderr_console().print(line, soft_wrap=True)


def _lines() -> ProgressLines:
    return ProgressLines(_say)


@contextmanager
def byte_progress(label: str, total: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Show a bar in bytes with rate and time left, or lines if stderr is not a terminal."""
    if quiet:
        yield lambda nbytes: None
        return
    if not sys.stderr.isatty():
        lines, done = _lines(), 0

        def count(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            lines.advance(label, done, total)

        yield count
        return
    from rich.progress import DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

    with progress_bars(DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()) as progress:
        task = progress.add_task(label, total=total)
        yield lambda nbytes: progress.advance(task, nbytes)


@contextmanager
def stage_progress(*, quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Show one bar per stage of the work with its time left, or lines if stderr is not a terminal."""
    if quiet:
        yield lambda stage, done, total: None
        return
    if not sys.stderr.isatty():
        yield _lines().advance
        return
    from rich.progress import TaskID, TaskProgressColumn, TimeRemainingColumn

    tasks: dict[str, TaskID] = {}
    with progress_bars(TaskProgressColumn(), TimeRemainingColumn()) as progress:

        def advance(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total)
            progress.update(tasks[stage], completed=done, total=total)

        yield advance


def _objective(line: "MetricsLine") -> str:
    """Return the minimised loss and, where it has several, its parts."""
    if line.loss is None:
        return "no finite loss"
    parts = line.parts if len(line.parts) > 1 else {}
    sum_of = ", ".join(f"{name} {value:.4f}" for name, value in parts.items())
    return f"objective {line.loss:.4f} ({sum_of})" if sum_of else f"{line.objective} {line.loss:.4f} nats per token"


class TrainingScreen:
    """Shows messages of an uptraining run, and a bar if stderr is a terminal or else a line every 30 seconds.

    A closed terminal or a broken pipe does not end the run.
    """

    def __init__(self, bars: "Progress | None", *, quiet: bool) -> None:
        self._bars, self._quiet = bars, quiet
        self._console = stderr_console() if bars is None else bars.console
        self._tasks: dict[str, TaskID] = {}
        self._paces: dict[str, Pace] = {}
        self._shown = -SECONDS

    def say(self, message: str) -> None:
        if not self._quiet:
            with suppress(OSError):
                self._console.print(message, soft_wrap=True)

    def tokenize(self, label: str, done: int, total: int) -> None:
        from gqa_convert.text.generating import GENERATING

        self._advance(
            label if label == GENERATING else f"tokenising {label}", done, total, self._left("tokens", done, total)
        )

    def step(self, report: "StepReport") -> None:
        """Show a step that was logged."""
        from gqa_convert.training.metrics import LM_LOSS

        line, steps = report.line, report.steps
        step = line.step
        parts = [
            _objective(line),
            f"{line.tokens_per_second:,.0f} tokens/s",
        ]
        if line.mfu is not None:
            parts.append(f"MFU {line.mfu:.1%}")
        text = "  ".join(filter(None, [*parts, self._left("steps", step, steps)]))
        if line.evaluation_loss is not None:
            self.say(f"step {step:,}: {LM_LOSS} on held-out text {line.evaluation_loss:.4f} nats per token")
        if self._bars is None and (time.monotonic() - self._shown > SECONDS or step == steps):
            self._shown = time.monotonic()
            self.say(f"step {step:,} of {steps:,} ({step / steps:.1%})  {text}")
        self._advance("uptraining", step, steps, text)

    def _left(self, what: str, done: int, total: int) -> str:
        return self._paces.setdefault(what, Pace()).left(done, total)

    def _advance(self, label: str, done: int, total: int, text: str) -> None:
        if self._bars is None:
            return
        with suppress(OSError):
            if label not in self._tasks:
                self._tasks[label] = self._bars.add_task(label, total=total, text=text)
            self._bars.update(
                self._tasks[label], completed=done, text=text, visible=done < total or label == "uptraining"
            )


@contextmanager
def training_progress(*, quiet: bool) -> "Iterator[TrainingScreen]":
    """Show loss, tokens per second, share of the token budget and time left."""
    if quiet or not sys.stderr.isatty():
        yield TrainingScreen(None, quiet=quiet)
        return
    from rich.progress import TaskProgressColumn

    bars = progress_bars(TaskProgressColumn(), text_column("{task.fields[text]}"))
    bars.start()
    try:
        yield TrainingScreen(bars, quiet=quiet)
    finally:
        with suppress(OSError):
            bars.stop()
