"""`metrics.jsonl`, one JSON object per optimizer step, and the trackers that receive the same numbers."""

import dataclasses
import json
import math
import os
import resource
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from gqa_convert.checkpoint.atomic_files import write_whole
from gqa_convert.checkpoint.strict_json import JsonObject
from gqa_convert.training.recipe import Recipe

if TYPE_CHECKING:
    from gqa_convert.training.trainer import StepResult

LM_LOSS: Final = "language-model loss"
KL_LOSS: Final = "KL divergence from the teacher"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsLine:
    """One line of the file. Its JSON object omits fields that are None; numbers that are not finite are stored as None.

    Attributes:
        step: the number of the optimizer step, from 1 on.
        tokens: tokens of text since the beginning of the run.
        loss: the minimised loss, in nats per token.
        lm, kl: the parts of the loss that have a weight.
        learning_rate: the learning rate of the step.
        gradient_norm: the norm of the gradients before clipping.
        tokens_per_second: the rate of the step over all processes.
        peak_memory_gb: the most memory that the main process has used, on its GPU or else in RAM; 10^9 bytes.
        evaluation_loss: the loss on the held-out text in nats per token, if it was measured.
        skipped: True where the loss or a gradient was not finite, so that nothing was updated.
    """

    step: int
    tokens: int
    loss: float | None = None
    lm: float | None = None
    kl: float | None = None
    learning_rate: float
    gradient_norm: float | None = None
    tokens_per_second: float
    peak_memory_gb: float | None = None
    evaluation_loss: float | None = None
    skipped: bool | None = None

    @property
    def objective(self) -> str:
        """The quantity that `loss` is, in words: one of its parts, or their weighted sum."""
        if self.kl is None:
            return LM_LOSS
        return KL_LOSS if self.lm is None else f"weighted sum of {LM_LOSS} and {KL_LOSS}"

    def as_json(self) -> JsonObject:
        """The line's JSON object."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    @classmethod
    def from_json(cls, content: JsonObject) -> Self:
        """The line of an object in a file, whose missing keys are None."""
        values: JsonObject = {field.name: content.get(field.name) for field in dataclasses.fields(cls)}
        return cls(**values)


@dataclass(frozen=True, slots=True)
class StepReport:
    """The report that a caller of `uptrain_checkpoint` receives after a step.

    Attributes:
        line: the line of the metrics file.
        steps: how many steps the whole run has.
    """

    line: MetricsLine
    steps: int


OnStep = Callable[[StepReport], None]
"""Called on the main process after every step that is logged."""


class RunLog:
    """The log of a run: the metrics file, the caller's hook and trackers. Only the main process writes.

    Args:
        path: the path of the metrics file.
        step: the step that the run resumes from; lines of later ones, and a line cut short by a crash, are removed.
        steps: of the whole run.
        accelerator: accelerate's Accelerator.
        on_step: called with every line.
    """

    def __init__(self, path: Path, step: int, steps: int, accelerator: Any, on_step: OnStep) -> None:
        self._steps, self._accelerator, self._on_step = steps, accelerator, on_step
        self._file = None
        if accelerator.is_main_process:
            kept = [line for line in read_metrics(path) if line["step"] <= step]
            write_whole(path, "".join(json.dumps(line) + "\n" for line in kept).encode())
            self._file = path.open("ab", buffering=0)

    def write(self, result: "StepResult", evaluated: float | None) -> None:
        """Log a step."""
        if self._file is None:
            return
        line = MetricsLine(
            step=result.step,
            tokens=result.tokens,
            loss=_finite(result.loss),
            lm=_finite(result.lm),
            kl=_finite(result.kl),
            learning_rate=result.learning_rate,
            gradient_norm=_finite(result.gradient_norm),
            tokens_per_second=round(result.tokens_per_second, 1),
            peak_memory_gb=round(_peak_memory(self._accelerator.device) / 1e9, 3),
            evaluation_loss=_finite(evaluated),
            skipped=True if result.skipped else None,
        )
        rest = memoryview((json.dumps(line.as_json()) + "\n").encode())
        while rest:
            rest = rest[self._file.write(rest) :]
        self._on_step(StepReport(line, self._steps))
        if self._accelerator.trackers:
            numbers = line.as_json()
            del numbers["step"]
            self._accelerator.log(numbers, step=line.step)

    def sync(self) -> None:
        """Wait until all lines are on disk."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file. Errors of the file system are ignored, because everything essential has been saved."""
        if self._file is not None:
            with suppress(OSError):
                self.sync()
                self._file.close()


def start_trackers(accelerator: Any, recipe: Recipe, run_id: str) -> None:
    """Start reporting to the recipe's trackers. Weights & Biases continues a run of the same id; TensorBoard appends.

    Args:
        accelerator: accelerate's Accelerator.
        recipe: the recipe of the run.
        run_id: what the run is known by, however often it resumes.
    """
    if not recipe.trackers:
        return
    settings = {}
    for name, value in recipe.resolved().items():
        settings[name] = value if isinstance(value, int | float | str | bool) else str(value)
    options = {"wandb": {"id": run_id, "resume": "allow", "name": Path(recipe.output).name}}
    accelerator.init_trackers(
        recipe.tracker_project,
        config=settings,
        init_kwargs={name: options.get(name, {}) for name in recipe.trackers},
    )


def read_metrics(path: Path) -> list[JsonObject]:
    """The objects of a metrics file up to the first incomplete line; empty if there is no file."""
    lines: list[JsonObject] = []
    if path.is_file():
        for text in path.read_bytes().split(b"\n")[:-1]:
            try:
                line = json.loads(text)
            except ValueError:
                break
            if not isinstance(line, dict) or not isinstance(line.get("step"), int):
                break
            lines.append(line)
    return lines


def _finite(value: float | None) -> float | None:
    """The value, or None where it is not finite."""
    return value if value is not None and math.isfinite(value) else None


def _peak_memory(device: Any) -> int:
    """The most bytes that this process has used on its GPU, or else in RAM."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated(device))
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
