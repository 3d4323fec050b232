"""The printed summary of a report."""

from typing import TYPE_CHECKING

from .screen import stderr_console, stdout_console

if TYPE_CHECKING:
    from gqa_convert.publishing.report.run import ReportResult


def show_report(made: "ReportResult") -> None:
    """Print the files that were read or ignored on stderr, and the figures and pages on stdout."""
    notes = [
        *(f"read     {each.file}: {each.kind}" for each in made.read),
        *(f"ignored  {each.file}: {each.why}" for each in made.ignored),
        *(f"note     {note}" for note in made.notes),
    ]
    result = [
        *(f"missing  {each.title}: {each.advice}" for each in made.missing),
        f"figures  {', '.join(each.title for each in made.figures) or 'none'}",
        f"report   {made.html}",
        f"         {made.markdown}",
    ]
    for console, lines in ((stderr_console(), notes), (stdout_console(), result)):
        for line in lines:
            console.print(line, soft_wrap=True)
