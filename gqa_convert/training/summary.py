"""The results of a whole run: `summary.json`, and the entry in the model's provenance."""

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Self

from gqa_convert.checkpoint.machine import Measurement
from gqa_convert.checkpoint.results import Result
from gqa_convert.checkpoint.strict_json import JsonObject
from gqa_convert.training.metrics import MetricsLine
from gqa_convert.training.recipe import Recipe

if TYPE_CHECKING:
    from gqa_convert.training.checkpoints import Progress  # imports torch, which publish and report do not need


@dataclass(frozen=True, slots=True)
class Recovery:
    """Losses on the held-out text, in nats per token.

    Attributes:
        start: the loss of the converted checkpoint.
        source: the loss of its source; None if it was not measured.
        final: the loss of the trained model.
        recovered_share: the share of the gap between start and source that training closed; None without a gap.
    """

    start: float
    source: float | None
    final: float
    recovered_share: float | None


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast this process group trained since it resumed.

    Attributes:
        steps: optimizer steps.
        seconds: seconds in the training loop.
        tokens: tokens of text.
    """

    steps: int
    seconds: float
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary(Result):
    """The content of `summary.json`.

    Attributes:
        head: kind, time, command and machine, as `Measurement.as_json` states them.
        processes: the number of processes.
        model: the folder of the trained model.
        steps, tokens, skipped_steps: of the whole run.
        alpha: `tokens` as a share of the source's pretraining tokens, if those are known.
        changes: changes of the recipe when the run was resumed.
        final_loss: the last training loss, in nats per token.
        evaluation: losses on the held-out text, if they were measured.
        steps_since_resumption, seconds_since_resumption, tokens_per_second: the pace.
        adapters: the adapters that were trained and merged, in words; None if the weights were trained.
    """

    head: JsonObject
    processes: int
    model: str
    steps: int
    tokens: int
    alpha: float | None
    skipped_steps: int
    changes: list[str]
    final_loss: float | None
    evaluation: Recovery | None
    steps_since_resumption: int
    seconds_since_resumption: float
    tokens_per_second: int
    adapters: str | None = None

    def as_json(self) -> JsonObject:
        """The summary as plain data."""
        values = asdict(self)
        del values["head"]
        return self.head | values

    @classmethod
    def from_json(cls, content: JsonObject) -> Self:
        """The summary in a file.

        Raises:
            KeyError, TypeError: a key is missing, or the losses are not those of a `Recovery`.
        """
        names = [each.name for each in fields(cls) if each.name != "head"]
        values: JsonObject = {name: content[name] for name in names}
        if values["evaluation"] is not None:
            values["evaluation"] = Recovery(**values["evaluation"])
        return cls(head={key: value for key, value in content.items() if key not in values}, **values)

    def provenance(self, recipe: Recipe) -> JsonObject:
        """The entry for the trained model's provenance."""
        values = self.as_json()
        kept = (*self.head, "processes", "tokens", "evaluation", "changes")
        adapters = {} if self.adapters is None else {"adapters": self.adapters}
        return {name: values[name] for name in kept} | adapters | {"recipe": recipe.resolved()}


def recovery(evaluations: dict[str, float], final: float | None) -> Recovery | None:
    """The losses on the held-out text and the share of the gap that was closed; None if they were not measured.

    Args:
        evaluations: at the `start` and of the `source`, as far as they were measured.
        final: the loss at the end.
    """
    if "start" not in evaluations or final is None:
        return None
    start, source = evaluations["start"], evaluations.get("source")
    share = None if source is None or start <= source else (start - final) / (start - source)
    return Recovery(start, source, final, share)


def summarise(
    recipe: Recipe,
    progress: "Progress",
    last: MetricsLine | None,
    pace: Pace,
    *,
    measurement: Measurement,
    processes: int,
    model: str,
) -> RunSummary:
    """The summary of a complete run.

    Args:
        recipe: the recipe of the run.
        progress: the progress at the end of the run.
        last: the last line of the metrics file; None if there is none.
        pace: the pace since the run resumed.
        measurement: command, time, versions and machine.
        processes: the number of processes.
        model: the folder of the trained model.
    """
    return RunSummary(
        head=measurement.as_json(),
        processes=processes,
        model=model,
        steps=progress.step,
        tokens=progress.tokens,
        alpha=progress.tokens / recipe.pretraining_tokens if recipe.pretraining_tokens else None,
        skipped_steps=progress.skipped,
        changes=progress.changes,
        final_loss=last.loss if last else None,
        evaluation=recovery(progress.evaluations, last.evaluation_loss if last else None),
        steps_since_resumption=pace.steps,
        seconds_since_resumption=round(pace.seconds, 1),
        tokens_per_second=round(pace.tokens / max(pace.seconds, 1e-3)),
        adapters=None if recipe.lora is None else str(recipe.lora),
    )
