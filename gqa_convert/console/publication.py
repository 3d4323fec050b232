"""What was published, or would be."""

from typing import Any

from .screen import size, stderr_console


def say_upload(repo_id: str) -> None:
    """A line before the upload, whose bars are the Hub client's own."""
    stderr_console().print(f"checked; sending to {repo_id}", soft_wrap=True, markup=False)


def show_publication(made: dict[str, Any]) -> None:
    """Files, warnings, and where it is."""
    console = stderr_console()
    verb = "would send" if made["dry_run"] else "sent"
    replaced = made["replaced"] or ()
    for file in made["files"]:
        note = " (replaced)" if file["path"] in replaced else ""
        console.print(f"{verb}  {file['path']}, {size(file['bytes'])}, sha256 {file['sha256'][:16]}{note}", soft_wrap=True, markup=False)
    total = sum(file["bytes"] for file in made["files"])
    console.print(f"in all   {len(made['files'])} files, {size(total)}", soft_wrap=True, markup=False)
    for warning in made["warnings"]:
        console.print(f"[yellow]note:[/yellow] {warning.replace('[', chr(92) + '[')}", soft_wrap=True)
    console.print(f"card     {made['card']}", soft_wrap=True, markup=False)
    where = made["pull_request"] or made["url"]
    console.print(f"{'to be at' if made['dry_run'] else 'it is at'} {where}", soft_wrap=True, markup=False)
