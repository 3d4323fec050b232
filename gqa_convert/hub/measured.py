"""The results of evaluate, benchmark and lm-eval that a card states: those whose fingerprint is the checkpoint's."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gqa_convert.checkpoint.fingerprint import fingerprint
from gqa_convert.checkpoint.paths import local_path
from gqa_convert.hub.converted import Converted
from gqa_convert.measuring.results import (
    BenchmarkFile,
    EvaluationFile,
    ModelScores,
    TimedCell,
    load_result,
)


class Scored(NamedTuple):
    """An evaluation of the checkpoint, and of its source where that was scored on the same text."""

    file: EvaluationFile
    ours: ModelScores
    source: ModelScores | None


class Timed(NamedTuple):
    """A benchmark at the K/V heads of the checkpoint and of its source.

    Attributes:
        speedups: the source's time of a decode step over the checkpoint's, at each batch and context.
    """

    file: BenchmarkFile
    cells: list[TimedCell]
    speedups: list[float]


class Figure(NamedTuple):
    """A figure of lm-eval and its standard error, None where it has none."""

    task: str
    metric: str
    value: float
    error: float | None


class TaskFile(BaseModel):
    """What `lm_eval --output_path` writes: `{"results": {task: {"acc,none": 0.5, "acc_stderr,none": 0.1}}}`."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())

    lm_eval_version: str
    model_name: str
    results: dict[str, dict[str, float | str | None]]
    shots: dict[str, int] = Field(alias="n-shot")

    def figures(self) -> list[Figure]:
        """The figures of all tasks."""
        found = []
        for task, metrics in self.results.items():
            for name, value in metrics.items():
                error = metrics.get(name.replace(",", "_stderr,"))
                if "," in name and "_stderr," not in name and isinstance(value, float):
                    found.append(Figure(task, name, value, error if isinstance(error, float) else None))
        return found


@dataclass
class Measured:
    """The results of a checkpoint, in the order in which they were given.

    Attributes:
        scored: by the text and how it was scored, in words.
        asked: evaluations with questions about long texts.
        warnings: on files that are left out.
    """

    scored: dict[str, Scored] = field(default_factory=dict)
    asked: list[Scored] = field(default_factory=list)
    timed: list[Timed] = field(default_factory=list)
    tasks: list[TaskFile] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def add_evaluation(self, file: EvaluationFile, model: Converted) -> bool:
        """Keep an evaluation if it measured the checkpoint, and return whether it did; of several on one text, the newest."""
        scores = {score.fingerprint: score for score in file.entries()}
        ours = scores.get(model.fingerprint)
        if ours is None:
            return False
        scored = Scored(file, ours, scores.get(model.first.source.fingerprint))
        if ours.retrieval:
            self.asked.append(scored)
        if file.data is not None:
            text = f"{file.data.source}, {file.objective}"
            options = file.data.model_dump(exclude={"source", "sha256"}) | {"context": file.context}
            for key, value in options.items():
                if value not in (None, "train", "text"):
                    text += f", {key.replace('_', ' ')} {value}"
            if self.scored.setdefault(text, scored).file.created < file.created:
                self.scored[text] = scored
        return True

    def add_benchmark(self, file: BenchmarkFile, model: Converted) -> bool:
        """Keep a benchmark if it timed the checkpoint's K/V heads, and return whether it did."""
        ours, source = model.record.groups, model.first.source_kv_heads
        known = (model.fingerprint, model.first.source.fingerprint)
        cells = [
            cell
            for cell in file.results
            if cell.groups in (ours, source) and (cell.fingerprint or file.fingerprint) in known
        ]
        before = {(cell.batch, cell.context): cell.decode_ms_per_token for cell in cells if cell.groups == source}
        speedups = []
        for cell in cells:
            slow = before.get((cell.batch, cell.context))
            if slow and cell.decode_ms_per_token and cell.groups != source:
                speedups.append(slow / cell.decode_ms_per_token)
        belongs = any(cell.groups == ours for cell in cells)
        if belongs:
            self.timed.append(Timed(file, cells, speedups))
        return belongs

    def add_tasks(self, file: TaskFile, model: Converted, repo_id: str) -> bool:
        """Keep the results of tasks if they are the checkpoint's, and return whether they are."""
        folder = local_path(file.model_name)
        belongs = file.model_name == repo_id or (folder.is_dir() and fingerprint(folder) == model.fingerprint)
        if belongs:
            self.tasks.append(file)
        return belongs


def read_measured(paths: Sequence[Path], model: Converted, repo_id: str) -> Measured:
    """Read files of results, and keep those of a checkpoint.

    Raises:
        ReportError: a file can't be read, or holds no results.
    """
    measured = Measured()
    for path in map(local_path, paths):
        try:
            belongs = measured.add_tasks(TaskFile.model_validate_json(path.read_bytes()), model, repo_id)
        except (OSError, ValidationError):  # no file of lm-eval
            file = load_result(path)
            if isinstance(file, EvaluationFile):
                belongs = measured.add_evaluation(file, model)
            else:
                belongs = measured.add_benchmark(file, model)
        if not belongs:
            measured.warnings.append(
                f"{path} is left out: it measured other models than {model.folder} as it is now; measure again"
            )
    return measured
