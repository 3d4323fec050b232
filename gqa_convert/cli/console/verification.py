"""The checks of a verification."""

from typing import Any

from .screen import stdout_console, styled


def show_verification(report: dict[str, Any]) -> None:
    """Every check with its outcome."""
    console = stdout_console()
    for check in report["checks"]:
        mark = ("ok  ", "green") if check["passed"] else ("FAIL", "red")
        console.print(styled(mark, f"  {check['name']:<22} {check['detail']}"), soft_wrap=True)
    consequence = "it is not what a conversion of SOURCE makes; unless it was trained since, do not use it"
    console.print(
        styled(("verified", "green") if report["passed"] else (f"not verified: {consequence}", "red")), soft_wrap=True
    )
