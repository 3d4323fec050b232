"""The numbers of a run: a line of `metrics.jsonl` for an optimizer step, of which trackers receive
the same, and `summary.json`.
"""

import json
import math
import resource
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from gqa_convert.errors import MissingExtraError
from gqa_convert.processes import rank
from gqa_convert.runtime.json_objects import JsonObject, Result

from .recipe import Recipe


@dataclass(slots=True, kw_only=True)
class StepMetrics:
    """One optimizer step, over all processes. Its JSON object omits what is None, false or not
    finite.

    Attributes:
        step: the number of the optimizer step, from 1 on.
        tokens: tokens of text since the beginning of the run.
        loss: the minimised loss, in nats per token.
        lm, kl: the parts of the loss that have a weight.
        learning_rate: the learning rate of the step.
        gradient_norm: the norm of the gradients before clipping.
        tokens_per_second: the rate of the step over all processes.
        skipped: whether the loss or a gradient was not finite, so that nothing was updated.
        peak_memory_gb: the most memory that the main process has used, on its GPU or else in RAM;
            10^9 bytes.
        evaluation_loss: the loss on the held-out text in nats per token, if it was measured.
    """

    step: int
    tokens: int
    loss: float
    lm: float | None = None
    kl: float | None = None
    learning_rate: float
    gradient_norm: float
    tokens_per_second: float = 0.0
    skipped: bool = False
    peak_memory_gb: float | None = None
    evaluation_loss: float | None = None

    def as_json(self) -> JsonObject:
        """The line's JSON object."""
        return {
            name: number
            for name, number in asdict(self).items()
            if number is not None and number is not False and math.isfinite(number)
        }


OnStep = Callable[[StepMetrics, int], None]
"""Called on the main process after every step that is logged, with the number of steps in the whole
run.
"""


def log_step(
    path: Path, accelerator: Any, on_step: OnStep, steps: int, metrics: StepMetrics
) -> None:
    """Log a step on the main process: in the metrics file, for the caller, and in trackers.

    Args:
        path: of the metrics file.
        accelerator: has the trackers.
        on_step: the caller's function.
        steps: of the whole run.
        metrics: of the step, which gain the memory that was used.
    """
    if rank():
        return
    used = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if accelerator.device.type == "cuda":
        used = torch.cuda.max_memory_allocated()
    metrics.peak_memory_gb = round(used / 1e9, 3)
    numbers = metrics.as_json()
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(numbers) + "\n")
    on_step(metrics, steps)
    del numbers["step"]
    accelerator.log(numbers, metrics.step)


def check_trackers(accelerator: Any, recipe: Recipe) -> None:
    """Refuse trackers that are not installed, which accelerate omits silently.

    Raises:
        MissingExtraError: a tracker is not installed.
    """
    known = [str(tracker) for tracker in accelerator.log_with]
    for tracker in recipe.trackers:
        if tracker not in known:
            raise MissingExtraError(
                f"trackers names {tracker}, which is not installed: pip install {tracker}, "
                "or remove it from trackers"
            )


def read_metrics(path: Path) -> list[JsonObject]:
    """The objects of a metrics file up to the first incomplete line; empty if there is no file."""
    lines: list[JsonObject] = []
    with suppress(FileNotFoundError, ValueError):  # what stands before a broken line remains
        lines.extend(json.loads(text) for text in path.read_bytes().split(b"\n")[:-1])
    return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary(Result):
    """The content of `summary.json`.

    Attributes:
        kind, created, command, machine: as in every measurement.
        processes: the number of processes.
        model: the folder of the trained model.
        steps, tokens, skipped_steps: of the whole run.
        alpha: `tokens` as a share of the source's pretraining tokens, if those are known.
        changes: changes of the recipe when the run was resumed.
        recipe: the resolved recipe, with the commits of Hub datasets.
        final_loss: the last training loss, in nats per token.
        evaluation: losses on the held-out text in nats per token, if they were measured; see
            `recovery`.
        adapters: the adapters that were trained and merged, in words; None if the weights were
            trained.
    """

    kind: str
    created: str
    command: list[str] | None
    machine: JsonObject
    processes: int
    model: str
    steps: int
    tokens: int
    alpha: float | None
    skipped_steps: int
    changes: list[str]
    recipe: JsonObject
    final_loss: float | None
    evaluation: JsonObject | None
    adapters: str | None = None


def recovery(evaluations: dict[str, float]) -> JsonObject | None:
    """The losses on the held-out text and the share of the gap that was closed.

    Args:
        evaluations: at the `start`, the `last` one, and of the `source` if it was measured; empty
            without held-out text.

    Returns:
        The losses of the converted checkpoint, `start`, of its `source` (None if it was not
        measured) and of the trained model, `final`; and the `recovered_share` of the gap between
        the first two, None without a gap. None if there are no losses.
    """
    if not evaluations:
        return None
    start, final = evaluations["start"], evaluations["last"]
    source = evaluations.get("source")
    share = None
    if source is not None and start > source:
        share = (start - final) / (start - source)
    return {"start": start, "source": source, "final": final, "recovered_share": share}
