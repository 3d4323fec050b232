"""`gqa-convert publish`."""

from pathlib import Path
from typing import Annotated

import typer

from .options import Json, Quiet


def publish(
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Folder written by convert or uptrain.", show_default=False)
    ],
    repo_id: Annotated[
        str,
        typer.Option(
            "--repo-id",
            metavar="ORG/NAME",
            help="Repository on the Hub; created if it does not exist.",
            show_default=False,
        ),
    ],
    private: Annotated[bool, typer.Option("--private", help="Create the repository as private.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Write OUT/README.md and list the files to upload, without network access."),
    ] = False,
    results: Annotated[
        list[Path] | None,
        typer.Option(
            "--results",
            "-r",
            metavar="PATH",
            help="JSON of evaluate or benchmark, or a folder with it, for the card; repeatable.",
            show_default=False,
        ),
    ] = None,
    evaluated_as: Annotated[
        list[str] | None,
        typer.Option(
            "--evaluated-as",
            metavar="NAME",
            help="Name of OUT in the results, if it was moved after they were measured; repeatable.",
            show_default=False,
        ),
    ] = None,
    base_model: Annotated[
        str | None,
        typer.Option(
            "--base-model",
            metavar="ORG/NAME",
            help="Source model on the Hub. Default: the one that the conversion recorded.",
            show_default=False,
        ),
    ] = None,
    licence: Annotated[
        str | None,
        typer.Option(
            "--license",
            metavar="ID",
            help="Licence of the result, for example apache-2.0. Default: that in the README.md of the source.",
            show_default=False,
        ),
    ] = None,
    dataset: Annotated[
        list[str] | None,
        typer.Option(
            "--dataset",
            metavar="ORG/NAME",
            help="Hub dataset on which OUT was trained; repeatable.",
            show_default=False,
        ),
    ] = None,
    overwrite_card: Annotated[
        bool,
        typer.Option(
            "--overwrite-card", help="Rename an existing README.md that publish did not write, and write the card."
        ),
    ] = False,
    revision: Annotated[
        str | None,
        typer.Option(
            "--revision",
            metavar="BRANCH",
            help="Branch to upload to; created if it does not exist. Default: main.",
            show_default=False,
        ),
    ] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead of committing.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a model card and upload a converted checkpoint to the Hugging Face Hub.

    You must be logged in (hf auth login). The card states only what OUT records and what the results measured. All
    files are checked before anything is written, and compared by hash after the upload. The same command resumes an
    interrupted upload. Nothing on the Hub is deleted.

    Examples:

      gqa-convert publish ./Llama-2-7b-gqa8 --repo-id me/Llama-2-7b-gqa8 --dry-run
      gqa-convert publish ./Llama-2-7b-gqa8 --repo-id me/Llama-2-7b-gqa8 --private --results runs/evaluate.json
      gqa-convert publish ./gqa8 --repo-id me/gqa8 --base-model org/model --license apache-2.0 --create-pr
    """
    from functools import partial

    from gqa_convert.cli.console.progress import byte_progress
    from gqa_convert.cli.console.publication import show_arrival, show_checked
    from gqa_convert.cli.console.screen import print_json
    from gqa_convert.publishing.publish import Options, publish
    from gqa_convert.publishing.remote import Place

    options = Options(
        tuple(results or ()), tuple(evaluated_as or ()), base_model, licence, tuple(dataset or ()), overwrite_card
    )
    made = publish(
        out,
        Place(repo_id, revision, private, create_pr),
        options,
        dry_run=dry_run,
        reading=partial(byte_progress, "hashing", quiet=quiet),
        on_checked=lambda checked: None if quiet or (as_json and dry_run) else show_checked(checked),
    )
    if as_json:
        print_json(made.as_json())
    elif not quiet:
        show_arrival(made)
