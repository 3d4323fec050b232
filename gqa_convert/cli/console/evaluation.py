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
from .tables import show_columns


def show_evaluation(results: EvaluationFile) -> None:
    """Print tables with a row for each model, then notes."""
    entries = results.entries()
    names = short_names(entries)
    if results.data is not None:
        show_columns(columns(entries, names), title=title(results))
    if results.questions is not None:
        show_columns(retrieval_columns(entries, names), title=retrieval_title(results.questions))
    for note in notes(entries, names):
        print_note(note)
