"""The results of evaluate that a card states: those whose fingerprint is the checkpoint's."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from gqa_convert.checkpoint.fingerprint import fingerprint
from gqa_convert.measuring.results import EvaluationFile, ModelScores, load_evaluation
from gqa_convert.measuring.tables import Table, evaluation_tables, notes
from gqa_convert.runtime.paths import local_path

from .converted import Converted, names_on_hub, without_folders


class Evaluated(NamedTuple):
    """An evaluation of the checkpoint, and of its source where that was measured too."""

    file: EvaluationFile
    ours: ModelScores
    source: ModelScores | None
    tables: list[Table]
    notes: list[str]


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
        on_hub = names_on_hub(content)
        stated = {key: content[key] for key in ("command", "data")}
        shown = EvaluationFile.model_validate(content | without_folders(stated, on_hub))
        names = {}
        for each in file.entries():
            names[each.model] = called.get(each.fingerprint) or without_folders(each.model, on_hub)
        # a row for the source, where it was measured too
        source = scores.get(of_source)
        entries = [ours] if source is None else [source, ours]
        tables = evaluation_tables(shown, entries, names)
        measured.append(Evaluated(shown, ours, source, tables, notes(entries, names)))
    return measured, warnings
