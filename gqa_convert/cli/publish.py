"""`gqa-convert publish`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gqa_convert.checkpoint.byte_sizes import size

from .options import Json, Quiet

if TYPE_CHECKING:
    from rich.console import Console

    from gqa_convert.hub.publishing import Publication


def publish(
    out: Path,
    repo_id: str,
    private: bool = False,
    dry_run: bool = False,
    results: list[Path] | None = None,
    base_model: str | None = None,
    licence: str | None = None,
    overwrite_card: bool = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a model card and upload a converted checkpoint to the Hugging Face Hub.

    You must be logged in (hf auth login). The card states only what OUT records and what the results measured. All
    files are checked and listed before anything is sent, and compared by hash after the upload. The same command
    resumes an interrupted upload. Nothing on the Hub is deleted.

    Examples:

      gqa-convert publish ./Llama-2-7b-gqa8 --repo-id me/Llama-2-7b-gqa8 --dry-run
      gqa-convert publish ./Llama-2-7b-gqa8 --repo-id me/Llama-2-7b-gqa8 --private --results evaluation.json
      gqa-convert publish ./gqa8 --repo-id me/gqa8 --base-model org/model --license apache-2.0

    Args:
        OUT: Folder written by convert or uptrain.
        --repo-id ORG/NAME: Repository on the Hub; created if it does not exist.
        --private: Create the repository as private.
        --dry-run: Write OUT/README.md and list the files to upload, without network access.
        --results -r FILE: JSON of evaluate, benchmark or lm_eval for the card; repeatable.
        --base-model ORG/NAME: Source model on the Hub. Default: the one that the conversion recorded.
        --license ID: Licence of the result. Default: that in the README.md of the source.
        --overwrite-card: Rename a README.md that publish did not write, and write the card.
    """
    from huggingface_hub.utils import disable_progress_bars

    from gqa_convert.cli.console.progress import ProgressScreen
    from gqa_convert.cli.console.screen import print_json, stderr_console, stdout_console
    from gqa_convert.hub.options import PublishOptions
    from gqa_convert.hub.publishing import publish

    if quiet or not sys.stderr.isatty():
        disable_progress_bars()

    console = stderr_console()
    if dry_run and not as_json:
        console = stdout_console()

    def show_checked(publication: "Publication") -> None:
        if not quiet:
            _show_files(publication, console)

    options = PublishOptions(
        repo_id,
        private,
        results=tuple(results or ()),
        base_model=base_model,
        license=licence,
        overwrite_card=overwrite_card,
    )
    with ProgressScreen(quiet=quiet) as screen:
        published = publish(out, options, dry_run=dry_run, on_progress=screen.show, on_checked=show_checked)
    if as_json:
        print_json(published.as_json())
    elif not (quiet or dry_run):
        stdout_console().print(f"published at {published.url}")


def _show_files(publication: "Publication", console: "Console") -> None:
    """Print what is sent, and where."""
    from gqa_convert.hub.markup import printable

    from .console.screen import print_note

    verb = "would send" if publication.dry_run else "sending"
    for file in publication.files:
        line = f"{verb}  {file.path}, {size(file.bytes)}"
        if file.path in (publication.replaced or ()):
            line += ", replaces another file"
        console.print(printable(line))
    total = size(sum(file.bytes for file in publication.files))
    console.print(f"total    {len(publication.files)} files, {total}")
    default = "public, unless it exists and is private or its organisation makes repositories private"
    visibility = {True: "private", False: "public", None: default}[publication.private]
    console.print(f"to       {publication.url}, {visibility}")
    console.print(f"card     {publication.card}")
    for warning in publication.warnings:
        print_note(printable(warning), console)
