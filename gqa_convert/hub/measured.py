"""The results of evaluate that a card states: those whose fingerprint is the checkpoint's."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gqa_convert.checkpoint.fingerprint import fingerprint
from gqa_convert.hub.converted import Converted, PublicNames
from gqa_convert.measuring.results import EvaluationFile, ModelScores, load_evaluation
from gqa_convert.measuring.tables import Table, evaluation_tables, notes
from gqa_convert.runtime.paths import local_path


class Evaluated(NamedTuple):
    """An evaluation of the checkpoint, and of its source where that was measured too."""

    file: EvaluationFile
    ours: ModelScores
    source: ModelScores | None
    tables: list[Table]
    notes: list[str]


_METRICS = {
    "loss": ("loss", "loss (nats per token)"),
    "kl": ("kl", "KL divergence from the source (nats per token)"),
    "bits_per_byte": ("bits_per_byte", "bits per byte"),
    "word_error_rate": ("wer", "word error rate"),
}
"""The Hub's names of what `evaluate` measures on a text, for machines and for people."""


def eval_results(measured: Sequence[Evaluated], task: str) -> list[Any]:
    """The figures as the metadata of a card states them: huggingface_hub's `EvalResult`.

    Args:
        measured: evaluations.
        task: of the model, as the Hub calls it.
    """
    from huggingface_hub import EvalResult

    found = []
    for each in measured:
        data, answers = each.file.data, each.ours.retrieval
        for key, (metric, name) in _METRICS.items():
            value = getattr(each.ours, key)
            if data is None or value is None:
                continue
            found.append(
                EvalResult(
                    task,
                    data.source,
                    data.source,
                    metric,
                    value,
                    metric_name=name,
                    dataset_config=data.name,
                    dataset_split=data.revision and data.split,  # files have none
                    dataset_revision=data.revision,
                )
            )
        if answers:
            found.append(
                EvalResult(task, "made-up facts", "made-up facts", "exact_match", answers[0].found)
            )
    return found


def read_measured(paths: Sequence[Path], model: Converted) -> tuple[list[Evaluated], list[str]]:
    """Read files of results, and keep those of a checkpoint; returns them, and warnings on files
    that are left out.

    Raises:
        ReportError: a file can't be read, or holds no results.
    """
    own = fingerprint(model.checkpoint)
    of_source = model.first["source"]["fingerprint"]
    called = {of_source: "source", own: "this model"}
    measured, warnings = [], []
    for path in map(local_path, paths):
        file = load_evaluation(path)
        scores = {each.fingerprint: each for each in file.entries()}
        ours = scores.get(own)
        if ours is None:
            warnings.append(
                f"{path} is left out: "
                f"it measured other models than {model.folder} as it is now; measure again"
            )
            continue
        # names of models and texts, without folders of the machine
        content = file.as_json()
        public = PublicNames(content)
        stated = {key: content[key] for key in ("command", "data")}
        shown = EvaluationFile.model_validate(content | public.of(stated))
        names = {}
        for each in file.entries():
            names[each.model] = called.get(each.fingerprint) or public.name(each.model)
        # a row for the source, where it was measured too
        source = scores.get(of_source)
        entries = [ours] if source is None else [source, ours]
        tables = evaluation_tables(shown, entries, names)
        measured.append(Evaluated(shown, ours, source, tables, notes(entries, names)))
    return measured, warnings
