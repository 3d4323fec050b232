"""The results of an evaluation."""

from gqa_convert.measuring.evaluation.table import columns, notes, short_names, title
from gqa_convert.measuring.results import EvaluationFile

from .screen import print_note
from .tables import show_table


def show_evaluation(results: EvaluationFile) -> None:
    """Print a row for each model, then notes."""
    entries = results.entries()
    names = short_names(entries)
    cells = columns(entries, names)
    show_table(list(cells), list(zip(*cells.values(), strict=True)), title=title(results))
    for note in notes(entries, names):
        print_note(note)
