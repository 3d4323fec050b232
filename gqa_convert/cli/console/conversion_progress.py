"""Progress of a conversion on stderr: one bar on a terminal, elsewhere a line per layer and at most one every 30 seconds."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from gqa_convert.checkpoint.byte_sizes import size

from .bars import progress_bars, text_column
from .layer_pace import LayerPace
from .pace import Pace, ProgressLines, clock
from .screen import stderr_console

if TYPE_CHECKING:
    from rich.progress import Progress

    from gqa_convert.conversion.fit.records import LayerRecord, StageProgress, TrainingProgress, TrainingRecord

_TOGETHER = "all layers together"


class ConversionScreen:
    """Shows the stage, the layer, the step and the time left of a conversion.

    A closed terminal or a broken pipe does not end the work.

    Args:
        bars: on a terminal; it shows one task at a time. None for plain lines.
        quiet: show nothing.
    """

    def __init__(self, bars: "Progress | None", *, quiet: bool) -> None:
        self._bars, self._quiet = bars, quiet
        self._console = stderr_console() if bars is None else bars.console
        self._task = None if bars is None else bars.add_task("", total=None, step="", ends=None, visible=False)
        self._lines = ProgressLines(self.say)
        self._layers = LayerPace()
        self._training, self._writing, self._generating = Pace(), Pace(), Pace()
        self._written = self._to_write = 0
        self._fitting = False

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        if not self._quiet:
            with suppress(OSError):
                self._console.print(line, soft_wrap=True)

    def will_write(self, nbytes: int) -> None:
        """Note the size of the result's weights."""
        self._to_write = nbytes

    def layer(
        self, done: int, total: int, record: "LayerRecord | StageProgress | TrainingProgress | TrainingRecord"
    ) -> None:
        """Show a record of the work on layers; see `gqa_convert.conversion.fit.records.LayerDone`."""
        from gqa_convert.conversion.fit.records import StageProgress, TrainingProgress, TrainingRecord

        if isinstance(record, StageProgress):
            self._stage(done, record)
        elif isinstance(record, TrainingProgress):
            left = self._training.seconds(record.done, record.total)
            self._lines.advance(_TOGETHER, record.done, record.total)
            self._show(
                _TOGETHER,
                record.done,
                record.total,
                f"step {record.done:,} of {record.total:,}" + ("" if record.kl is None else f", KL {record.kl:.3f}"),
                left,
            )
        elif isinstance(record, TrainingRecord):
            self.say(
                f"{_TOGETHER}: KL divergence from the source {record.kl.before:.4f} -> {record.kl.after:.4f} nats per token"
            )
        else:
            self._layer_done(done, total, record)

    def written(self, nbytes: int) -> None:
        """Note that weights were written."""
        self._written += nbytes
        done, total = self._written, self._to_write
        self._lines.advance("converting", done, total)
        self._show("converting", done, total, f"{size(done)} of {size(total)}", self._writing.seconds(done, total))

    def _stage(self, done: int, record: "StageProgress") -> None:
        from gqa_convert.conversion.fit.records import Stage

        self._fitting = True
        if record.stage is Stage.OWN_TEXT:
            self._lines.advance(str(record.stage), record.step, record.steps)
            detail, left = (
                f"{record.step:,} of {record.steps:,} tokens",
                self._generating.seconds(record.step, record.steps),
            )
            self._show(str(record.stage), record.step, record.steps, detail, left)
            return
        if record.layer:
            self._layers.stage(fits=record.stage is not Stage.FORWARD)
        label = f"layer {record.layer} of {record.layers}" if record.layer else str(record.stage)
        steps = f" {record.step:,} of {record.steps:,}" if record.steps else ""
        step = f"{record.stage}{steps}" if record.layer else ""
        if not done and self._bars is None:
            self._lines.note(": ".join(filter(None, [label, step])), self._left(done, record.layers))
        known = record.layer and self._layers.per_layer is not None
        self._show(
            label,
            done + self._layers.share,
            record.layers if known else None,
            step,
            self._layers.left(done, record.layers),
        )

    def _layer_done(self, done: int, total: int, record: "LayerRecord") -> None:
        from gqa_convert.conversion.fit.records import CalibratedRecord

        if not self._fitting:  # from the weights alone
            self._layers.stage(fits=True)
        self._layers.layer_done()
        if isinstance(record, CalibratedRecord):
            line = f"layer {done} of {total}  {record.module}: {record.gap_left:.1%} of mean pooling's error remains"
            self.say("  ".join(filter(None, [line, self._left(done, total) if self._bars is None else ""])))
        elif self._bars is None:
            self._lines.note(f"merging layers: {done} of {total}", self._left(done, total))
        self._show(f"layer {done} of {total}", done, total, "", self._layers.left(done, total))

    def _left(self, done: int, total: int) -> str:
        seconds = self._layers.left(done, total)
        return f"{clock(seconds)} left" if seconds else ""

    def _show(self, label: str, done: float, total: float | None, step: str, left: float | None) -> None:
        if self._bars is None or self._task is None:
            return
        with suppress(OSError):
            self._bars.update(
                self._task,
                description=label,
                completed=done,
                total=total,
                step=step,
                ends=None if left is None else time.monotonic() + left,
                visible=True,
            )


@contextmanager
def conversion_progress(*, quiet: bool) -> Iterator[ConversionScreen]:
    """Show the progress of a conversion."""
    if quiet or not sys.stderr.isatty():
        yield ConversionScreen(None, quiet=quiet)
        return
    from rich.progress import ProgressColumn, Task, TimeElapsedColumn
    from rich.text import Text

    class TimeLeft(ProgressColumn):
        """Counts down between reports, which may be minutes apart."""

        def render(self, task: Task) -> Text:
            ends = task.fields["ends"]
            return Text("" if ends is None else f"{clock(ends - time.monotonic())} left", style="progress.remaining")

    bars = progress_bars(text_column("{task.fields[step]}"), TimeElapsedColumn(), TimeLeft())
    bars.start()
    try:
        yield ConversionScreen(bars, quiet=quiet)
    finally:
        with suppress(OSError):
            bars.stop()
