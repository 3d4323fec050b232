"""The printed result of check-serving."""

from typing import TYPE_CHECKING

from .screen import stdout_console, styled

if TYPE_CHECKING:
    from gqa_convert.serving.checking import ServingReport

_MARKS = {"ok": ("ok", "green"), "failed": ("FAIL", "red"), "skipped": ("skipped", "yellow")}


def show_serving(report: "ServingReport") -> None:
    """Print a line for each engine, then the verdict."""
    console = stdout_console()
    lengths = ", ".join(map(str, report.prompts))
    if lengths:
        console.print(
            f"{report.model_type} in transformers {report.transformers}: prompts of {lengths} tokens, {report.new_tokens} new ones each",
            soft_wrap=True,
        )
    for entry in report.clients:
        name = " ".join(filter(None, (entry.client, entry.version)))
        mark, style = _MARKS.get(entry.status, ("not supported", ""))
        console.print(styled((f"{mark:<13}", style), f"  {name:<26} {entry.detail}"), soft_wrap=True)
    if report.tensor_parallel is not None:
        console.print(f"tensor parallel: {report.tensor_parallel.in_words()} (computed from the heads)", soft_wrap=True)
    states = [entry.status for entry in report.clients]
    if report.passed:
        verdict = ("every engine that ran agrees with transformers", "green")
    elif "failed" in states:
        verdict = ("an engine differs from transformers: do not serve OUT with an engine marked FAIL", "red")
    elif "ok" in states:
        verdict = ("incomplete: an engine named by --client or --python is not installed", "red")
    else:
        verdict = ("nothing was checked: no engine ran", "red")
    console.print(styled(verdict))
