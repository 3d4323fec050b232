"""The printed result of check-serving."""

from typing import TYPE_CHECKING

from .screen import stdout_console

if TYPE_CHECKING:
    from gqa_convert.serving.checking import ServingReport


def show_serving(report: "ServingReport") -> None:
    """Print a line for each engine, then the verdict."""
    console = stdout_console()
    for entry in report.clients:
        mark = entry["status"].replace("failed", "FAIL")
        name = f"{entry['client']} {entry['version'] or ''}"
        console.print(f"{mark:<13}  {name:<18} {entry['detail']}")
    states = [entry["status"] for entry in report.clients]
    verdict = "nothing was checked: no engine ran"
    if report.passed:
        verdict = "every engine that ran agrees with transformers"
    elif "failed" in states:
        verdict = "an engine differs from transformers: do not serve OUT with an engine marked FAIL"
    elif "ok" in states:
        verdict = "incomplete: an engine named by --engine or --python is not installed"
    console.print(verdict)
