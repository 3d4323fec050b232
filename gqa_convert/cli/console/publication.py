"""What will be published, and where it is."""

from typing import Any

from .screen import size, stderr_console, stdout_console, styled


def show_checked(made: dict[str, Any]) -> None:
    """Files and notes, before anything is sent: the result of a dry run, else a note."""
    console = stdout_console() if made["dry_run"] else stderr_console()
    verb = "would send" if made["dry_run"] else "sending"
    replaced = made["replaced"] or ()
    for file in made["files"]:
        note = ", in place of another" if file["path"] in replaced else ""
        line = f"{verb}  {file['path']}, {size(file['bytes'])}, sha256 {file['sha256'][:16]}{note}"
        console.print(_safe(line), soft_wrap=True)
    total = sum(file["bytes"] for file in made["files"])
    console.print(f"in all   {len(made['files'])} files, {size(total)}", soft_wrap=True)
    for warning in made["warnings"]:
        console.print(styled(("note:", "yellow"), f" {_safe(warning)}"), soft_wrap=True)
    console.print(f"card     {made['card']}", soft_wrap=True)


def show_arrival(made: dict[str, Any]) -> None:
    """The address."""
    where = made["pull_request"] or made["url"]
    stdout_console().print(f"{'to be at' if made['dry_run'] else 'it is at'} {where}", soft_wrap=True)


def _safe(line: str) -> str:
    """Names of files may hold anything."""
    return "".join(char if char.isprintable() else "?" for char in line)
