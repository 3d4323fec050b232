"""The results of an evaluation."""

from gqa_convert.measuring.evaluation.table import (
    columns,
    notes,
    retrieval_columns,
    retrieval_title,
    short_names,
    title,
)
from gqa_convert.measuring.results import EvaluationFile

from .screen import print_note
from .tables import show_table


def show_evaluation(results: EvaluationFile) -> None:
    """Print tables with a row for each model, then notes."""
    entries = results.entries()
    names = short_names(entries)
    if results.data is not None:
        cells = columns(entries, names)
        show_table(list(cells), list(zip(*cells.values(), strict=True)), title=title(results))
    if results.questions is not None:
        cells = retrieval_columns(entries, names)
        show_table(list(cells), list(zip(*cells.values(), strict=True)), title=retrieval_title(results.questions))
    for note in notes(entries, names):
        print_note(note)
