"""The checks of a verification."""

from typing import Any

from .screen import stderr_console


def show_verification(report: dict[str, Any]) -> None:
    """Every check with its outcome."""
    console = stderr_console()
    for check in report["checks"]:
        mark = "[green]ok  [/green]" if check["passed"] else "[red]FAIL[/red]"
        console.print(f"{mark}  {check['name']:<22} {check['detail']}", soft_wrap=True)
    consequence = "it is not what a conversion of SOURCE makes; unless it was trained since, do not use it"
    console.print("[green]verified[/green]" if report["passed"] else f"[red]not verified: {consequence}[/red]")
