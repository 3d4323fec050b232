"""`gqa-convert publish`."""

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gqa_convert.checkpoint.byte_sizes import size

from .options import Json, option

if TYPE_CHECKING:
    from rich.console import Console

    from gqa_convert.hub.publishing import Publication


def publish(
    out: Path = option("OUT", "Folder written by convert or uptrain.", ...),
    repo_id: str = option(
        "--repo-id ORG/NAME",
        "Repository on the Hub; created if it does not exist.",
        ...,
    ),
    private: bool = option("--private", "Create the repository as private.", False),
    dry_run: bool = option(
        "--dry-run",
        "Write OUT/README.md and list the files to upload, without network access.",
        False,
    ),
    results: list[Path] | None = option(
        "--results -r FILE",
        "JSON of evaluate for the card; repeatable.",
    ),
    base_model: str | None = option(
        "--base-model ORG/NAME",
        "Source model on the Hub. Default: the one that the conversion recorded.",
    ),
    licence: str | None = option(
        "--license ID",
        "Licence of the result. Default: that in the README.md of the source.",
    ),
    as_json: Json = False,
) -> None:
    """Write a model card and upload a converted checkpoint to the Hugging Face Hub.

    You must be logged in (hf auth login). The card states only what OUT records and what the results measured. All
    files are checked and listed before anything is sent, and compared by hash after the upload. The same command
    resumes an interrupted upload. Nothing on the Hub is deleted.

    Examples:

      gqa-convert publish ./Llama-2-7b-gqa8 --repo-id me/Llama-2-7b-gqa8 --dry-run
      gqa-convert publish ./Llama-2-7b-gqa8 --repo-id me/Llama-2-7b-gqa8 --private --results evaluation.json
      gqa-convert publish ./gqa8 --repo-id me/gqa8 --base-model org/model --license apache-2.0
    """
    from huggingface_hub.utils import disable_progress_bars

    from gqa_convert.cli.console.screen import ProgressScreen, make_console, print_json
    from gqa_convert.hub.options import PublishOptions
    from gqa_convert.hub.publishing import publish

    if not sys.stderr.isatty():
        disable_progress_bars()

    console = make_console(stderr=as_json or not dry_run)
    options = PublishOptions(
        repo_id,
        private,
        results=results or (),
        base_model=base_model,
        license=licence,
    )
    with ProgressScreen() as screen:
        published = publish(
            out, options, dry_run=dry_run, on_progress=screen.show, on_checked=partial(_show_files, console)
        )
    if as_json:
        print_json(published.as_json())
    elif not dry_run:
        make_console().print(f"published at {published.url}")


def _show_files(console: "Console", publication: "Publication") -> None:
    """Print what is sent, and where."""
    from gqa_convert.hub.markup import printable

    from .console.screen import print_note

    verb = "would send" if publication.dry_run else "sending"
    for file in publication.files:
        console.print(printable(f"{verb}  {file.path}, {size(file.bytes)}"))
    console.print(f"total    {len(publication.files)} files, {size(sum(file.bytes for file in publication.files))}")
    visibility = "private" if publication.private else "public, unless its owner makes it private"
    console.print(f"to       {publication.url}, {visibility}")
    console.print(f"card     {publication.card}")
    for warning in publication.warnings:
        print_note(printable(warning), console)
