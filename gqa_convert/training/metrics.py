"""`metrics.jsonl`: one JSON object per optimizer step."""

import dataclasses
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from gqa_convert.checkpoint.atomic_files import write_whole
from gqa_convert.checkpoint.strict_json import JsonObject

LM_LOSS: Final = "language-model loss"
_PARTS: Final = {"lm": LM_LOSS, "kl": "KL divergence from the teacher"}
"""The parts of the minimised loss in words."""


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
        overall_tokens_per_second: the rate since this start, with evaluating and saving.
        data_seconds: how long the main process waited for text in this step, its own or that of another process.
        peak_memory_gb: the most memory that the main process has used, on its GPU or else in RAM; 10^9 bytes.
        epochs: how often the data were read; None while a stream has not ended.
        source_losses: the loss on the samples of each of several sources.
        source_epochs: how often each of several sources was read, without streams that have not ended.
        mfu: model FLOPs utilisation, on known GPUs.
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
    mfu: float | None = None
    evaluation_loss: float | None = None
    skipped: bool | None = None
    overall_tokens_per_second: float | None = None
    data_seconds: float | None = None
    peak_memory_gb: float | None = None
    epochs: float | None = None
    source_losses: dict[str, float] | None = None
    source_epochs: dict[str, float] | None = None

    @property
    def parts(self) -> dict[str, float]:
        """The parts of the minimised loss that have a weight, by their names in words."""
        named = ((words, getattr(self, name)) for name, words in _PARTS.items())
        return {words: value for words, value in named if value is not None}

    @property
    def objective(self) -> str:
        """The quantity that `loss` is, in words: one of its parts, or their weighted sum."""
        parts = list(self.parts) or [LM_LOSS]
        return parts[0] if len(parts) == 1 else f"weighted sum of {' and '.join(parts)}"

    def as_json(self) -> JsonObject:
        """The line's JSON object."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    def numbers(self) -> dict[str, float]:
        """The numbers of the line, for trackers; those of a source follow a slash, as in `source_losses/text.txt`."""
        found: dict[str, float] = {}
        for name, value in self.as_json().items():
            values = (
                {f"{name}/{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
            )
            found |= values
        return found

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


def finite(value: float | None) -> float | None:
    """The value, or None where it is not finite."""
    return value if value is not None and math.isfinite(value) else None


class Metrics:
    """Appends lines to the file. A run that resumes from a step removes the lines after it.

    Args:
        path: the path of the file.
        step: the last step that counts; lines of later ones, and a line cut short by a crash, are removed.
    """

    def __init__(self, path: Path, step: int) -> None:
        kept = [line for line in read_metrics(path) if line["step"] <= step]
        write_whole(path, "".join(json.dumps(line) + "\n" for line in kept).encode())
        self._file = path.open("ab", buffering=0)

    def write(self, line: MetricsLine) -> None:
        """Append a line and flush it to the kernel."""
        rest = memoryview((json.dumps(line.as_json()) + "\n").encode())
        while rest:
            rest = rest[self._file.write(rest) :]

    def sync(self) -> None:
        """Wait until all lines are on disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self.sync()
        self._file.close()


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
