"""What each serving engine made of a checkpoint."""

from typing import Any

from .screen import stdout_console, styled

_MARKS = {"ok": ("ok", "green"), "failed": ("FAIL", "red"), "skipped": ("skipped", "yellow")}


def show_serving(report: dict[str, Any]) -> None:
    """A line for each engine, then the verdict."""
    console = stdout_console()
    lengths = ", ".join(map(str, report["prompts"]))
    if lengths:
        console.print(
            f"{report['model_type']} in transformers {report['transformers']}: prompts of {lengths} tokens, {report['new_tokens']} new ones each",
            soft_wrap=True,
        )
    for entry in report["clients"]:
        name = " ".join(filter(None, (entry["client"], _number(entry))))
        mark, style = _MARKS.get(entry["status"], ("not supported", ""))
        console.print(styled((f"{mark:<13}", style), f"  {name:<26} {entry['detail']}"), soft_wrap=True)
    states = [entry["status"] for entry in report["clients"]]
    if report["passed"]:
        verdict = ("served as transformers computes it", "green")
    elif "failed" in states:
        verdict = ("not served as transformers computes it: do not use OUT in an engine that failed", "red")
    elif "ok" in states:
        verdict = ("not checked as asked: a client that was named is absent", "red")
    else:
        verdict = ("nothing was checked: no client ran", "red")
    console.print(styled(verdict))


def _number(entry: dict[str, Any]) -> str:
    """The version, unless the name has it; of packages whose version is another's, such as an adapter's, the name says
    so.
    """
    return entry["version"] if entry["version"] and entry["client"] != "transformers-4.57" else ""
