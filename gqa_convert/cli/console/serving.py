"""The printed result of check-serving."""

from typing import TYPE_CHECKING

from .screen import stdout_console, styled

if TYPE_CHECKING:
    from gqa_convert.serving.checking import ServingReport

_STYLES = {"ok": "green", "failed": "red", "skipped": "yellow"}


def show_serving(report: "ServingReport") -> None:
    """Print a line for each engine, then the verdict."""
    console = stdout_console()
    if report.prompts:
        lengths = ", ".join(map(str, report.prompts))
        console.print(
            f"{report.model_type} in transformers {report.transformers}: prompts of {lengths} tokens, {report.new_tokens} new ones each",
            soft_wrap=True,
        )
    for entry in report.clients:
        status = entry["status"]
        mark = "FAIL" if status == "failed" else status
        name = f"{entry['client']} {entry['version'] or ''}"
        line = styled((f"{mark:<13}", _STYLES.get(status, "")), f"  {name:<18} {entry['detail']}")
        console.print(line, soft_wrap=True)
    states = [entry["status"] for entry in report.clients]
    if report.passed:
        verdict = ("every engine that ran agrees with transformers", "green")
    elif "failed" in states:
        verdict = ("an engine differs from transformers: do not serve OUT with an engine marked FAIL", "red")
    elif "ok" in states:
        verdict = ("incomplete: an engine named by --engine or --python is not installed", "red")
    else:
        verdict = ("nothing was checked: no engine ran", "red")
    console.print(styled(verdict))
