"""The printed result of a verification."""

from typing import Any

from .screen import stdout_console, styled


def show_verification(report: dict[str, Any]) -> None:
    """Print every check with its outcome, then the verdict."""
    console = stdout_console()
    for check in report["checks"]:
        mark = ("ok  ", "green") if check["passed"] else ("FAIL", "red")
        console.print(styled(mark, f"  {check['name']:<22} {check['detail']}"), soft_wrap=True)
    consequence = "OUT is not SOURCE with merged K/V heads; do not use it, unless it was uptrained after the conversion"
    console.print(
        styled(("verified", "green") if report["passed"] else (f"not verified: {consequence}", "red")), soft_wrap=True
    )
