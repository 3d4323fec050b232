"""The results of evaluate, benchmark and lm-eval that a card states: those whose fingerprint is the checkpoint's."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gqa_convert.checkpoint.fingerprint import fingerprint
from gqa_convert.checkpoint.paths import local_path
from gqa_convert.hub.converted import Converted
from gqa_convert.measuring.results import (
    BenchmarkFile,
    Difference,
    EvaluationFile,
    ModelScores,
    TimedCell,
    load_result,
)


@dataclass(frozen=True)
class Scored:
    """An evaluation of the checkpoint, and of its source where that was scored on the same text."""

    file: EvaluationFile
    ours: ModelScores
    source: ModelScores | None

    @property
    def paired(self) -> Difference | None:
        """The difference to the source over the same tokens, None where another model was compared with."""
        difference = self.ours.difference
        if difference and difference.loss is not None and self.source and difference.to == self.source.model:
            return difference
        return None


@dataclass(frozen=True)
class Timed:
    """A benchmark at the K/V heads of the checkpoint and of its source.

    Attributes:
        speedups: the source's time of a decode step over the checkpoint's, at each batch and context.
    """

    file: BenchmarkFile
    cells: list[TimedCell]
    speedups: list[float]


class TaskFile(BaseModel):
    """What `lm_eval --output_path` writes: `{"results": {task: {"acc,none": 0.5, "acc_stderr,none": 0.1}}}`."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())

    lm_eval_version: str
    model_name: str
    results: dict[str, dict[str, float | str | None]]
    shots: dict[str, int] = Field(alias="n-shot")

    def rows(self) -> list[tuple[str, str, float, object]]:
        """Task, metric, value and standard error of every figure."""
        found: list[tuple[str, str, float, object]] = []
        for task, metrics in self.results.items():
            for metric, value in metrics.items():
                if "," in metric and "_stderr," not in metric and isinstance(value, float):
                    found.append((task, metric, value, metrics.get(metric.replace(",", "_stderr,"))))
        return found


@dataclass(frozen=True)
class Measured:
    """All results that a card states, in the order in which they were given; warnings on files that are left out.

    Attributes:
        scored: by the text and how it was scored, in words.
        asked: evaluations with questions about long texts.
    """

    scored: dict[str, Scored] = field(default_factory=dict)
    asked: list[Scored] = field(default_factory=list)
    timed: list[Timed] = field(default_factory=list)
    tasks: list[TaskFile] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def read_measured(paths: Sequence[Path], model: Converted, repo_id: str) -> Measured:
    """Read files of results, and keep those of a checkpoint; of several evaluations on one text, the newest.

    Raises:
        ReportError: a file can't be read, or holds no results.
    """
    measured = Measured()
    for path in paths:
        file = _read_tasks(path) or load_result(path)
        if isinstance(file, EvaluationFile):
            belongs = _add_evaluation(measured, file, model)
        elif isinstance(file, BenchmarkFile):
            belongs = _add_benchmark(measured, file, model)
        else:
            belongs = _add_tasks(measured, file, model, repo_id)
        if not belongs:
            measured.warnings.append(
                f"{path} is left out: it measured other models than {model.folder} as it is now; measure again"
            )
    return measured


def _add_evaluation(measured: Measured, file: EvaluationFile, model: Converted) -> bool:
    scores = {score.fingerprint: score for score in file.entries()}
    if model.fingerprint not in scores:
        return False
    scored = Scored(file, scores[model.fingerprint], scores.get(model.first.source.fingerprint))
    if scored.ours.retrieval:
        measured.asked.append(scored)
    if file.data is None:
        return True
    text = f"{file.data.source}, {file.objective}"
    options = file.data.model_dump(exclude={"source", "sha256"}) | file.model_dump(include={"context"})
    for key, value in options.items():
        if value not in (None, "train", "text"):
            text += f", {key.replace('_', ' ')} {value}"
    if measured.scored.setdefault(text, scored).file.created < file.created:
        measured.scored[text] = scored
    return True


def _add_benchmark(measured: Measured, file: BenchmarkFile, model: Converted) -> bool:
    ours, source = model.record.groups, model.first.source_kv_heads
    known = (model.fingerprint, model.first.source.fingerprint)
    timed = [cell for cell in file.results if (cell.fingerprint or file.fingerprint) in known]
    before = {(cell.batch, cell.context): cell.decode_ms_per_token for cell in timed if cell.groups == source}
    cells = [cell for cell in timed if cell.groups in (ours, source)]
    speedups = []
    for cell in cells:
        slow = before.get((cell.batch, cell.context))
        if slow and cell.decode_ms_per_token and cell.groups == ours != source:
            speedups.append(slow / cell.decode_ms_per_token)
    belongs = any(cell.groups == ours for cell in cells)
    if belongs:
        measured.timed.append(Timed(file, cells, speedups))
    return belongs


def _read_tasks(path: Path) -> TaskFile | None:
    """The content of a file of lm-eval, None for any other file."""
    try:
        return TaskFile.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def _add_tasks(measured: Measured, file: TaskFile, model: Converted, repo_id: str) -> bool:
    folder = local_path(file.model_name)
    belongs = file.model_name == repo_id or (folder.is_dir() and fingerprint(folder) == model.fingerprint)
    if belongs:
        measured.tasks.append(file)
    return belongs
