"""Logs a step: writes a line of `metrics.jsonl`, calls the caller's hook, and reports to trackers."""

import resource
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from gqa_convert.training.loop import StepResult, Trainer
from gqa_convert.training.metrics import Metrics, MetricsLine, StepReport, finite

OnStep = Callable[[StepReport], None]
"""Called on the main process after every step that is logged."""


class RunLog:
    """The log of a run, written by the main process.

    Args:
        path: the path of the metrics file.
        step: the step that the run resumes from; later lines are removed.
        trainer: the trainer that takes the steps.
        on_step: called with every line.
        main: whether this is the main process; the others write nothing.
    """

    def __init__(self, path: Path, step: int, trainer: Trainer, on_step: OnStep, *, main: bool) -> None:
        self._trainer, self._on_step = trainer, on_step
        self._began, self._first_token = time.monotonic(), trainer.progress.tokens
        self._metrics = Metrics(path, step) if main else None

    def write(self, result: StepResult, evaluated: float | None) -> None:
        """Log a step if it is the last one, was skipped, has an evaluation, or is a multiple of `log_every`."""
        trainer, recipe = self._trainer, self._trainer.recipe
        due = result.step == trainer.steps or evaluated is not None or result.skipped
        if self._metrics is None or not (due or result.step % recipe.log_every == 0):
            return
        rate = trainer.tokens_per_step / result.seconds
        samples, drawn = trainer.samples, result.step * trainer.samples_per_step
        epochs = samples.epochs(drawn)
        several = len(samples.names) > 1
        line = MetricsLine(
            step=result.step,
            tokens=result.tokens,
            loss=finite(result.loss),
            lm=finite(result.lm),
            kl=finite(result.kl),
            learning_rate=result.learning_rate,
            gradient_norm=finite(result.gradient_norm),
            tokens_per_second=round(rate, 1),
            mfu=trainer.utilisation(rate),
            evaluation_loss=finite(evaluated),
            skipped=True if result.skipped else None,
            overall_tokens_per_second=round(
                (result.tokens - self._first_token) / max(time.monotonic() - self._began, 1e-3), 1
            ),
            data_seconds=round(result.data_seconds, 3),
            peak_memory_gb=round(_peak_memory(trainer.accelerator.device) / 1e9, 3),
            epochs=None if None in epochs else round(drawn / (samples.epoch_samples or 1), 4),
            source_losses=_named(samples.names, result.source_losses) if several else None,
            source_epochs=_named(samples.names, epochs) if several else None,
        )
        self._metrics.write(line)
        self._on_step(StepReport(line, trainer.steps))
        if recipe.trackers:
            numbers = {name: value for name, value in line.numbers().items() if name != "step"}
            trainer.accelerator.log(numbers, step=result.step)

    def sync(self) -> None:
        """Wait until all lines are on disk."""
        if self._metrics:
            self._metrics.sync()

    def close(self) -> None:
        """Close the file. Errors of the file system are ignored, because everything essential has been saved."""
        if self._metrics:
            with suppress(OSError):
                self._metrics.close()


def _named(names: Sequence[str], values: Sequence[float | None]) -> dict[str, float]:
    """The finite values by name."""
    pairs = ((name, finite(value)) for name, value in zip(names, values, strict=True))
    return {name: round(value, 6) for name, value in pairs if value is not None}


def _peak_memory(device: torch.device) -> int:
    """The most bytes that this process has used on its GPU, or else in RAM."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
