"""The files of an upload, and the address of the published checkpoint."""

from typing import TYPE_CHECKING

from gqa_convert.checkpoint.byte_sizes import size

from .screen import print_note, stderr_console, stdout_console

if TYPE_CHECKING:
    from gqa_convert.publishing.publish import Publication


def show_checked(made: "Publication") -> None:
    """Print the files and notes before the upload: on stdout in a dry run, else on stderr."""
    console = stdout_console() if made.dry_run else stderr_console()
    verb = "would send" if made.dry_run else "sending"
    replaced = made.replaced or ()
    for file in made.files:
        note = ", replaces another file" if file.path in replaced else ""
        line = f"{verb}  {file.path}, {size(file.size)}, sha256 {file.sha256[:16]}{note}"
        console.print(_safe(line), soft_wrap=True)
    total = sum(file.size for file in made.files)
    console.print(f"total    {len(made.files)} files, {size(total)}", soft_wrap=True)
    for warning in made.warnings:
        print_note(_safe(warning), console)
    console.print(f"card     {made.card}", soft_wrap=True)


def show_arrival(made: "Publication") -> None:
    """Print the address of the repository or pull request."""
    where = made.pull_request or made.url
    stdout_console().print(f"{'would be published at' if made.dry_run else 'published at'} {where}", soft_wrap=True)


def _safe(line: str) -> str:
    """Return a line whose unprintable characters, which file names may hold, are replaced."""
    return "".join(char if char.isprintable() else "?" for char in line)
