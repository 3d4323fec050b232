"""`gqa-convert publish`."""

from pathlib import Path
from typing import Annotated

import typer

from .options import Json, Quiet


def publish(
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Folder that convert or uptrain wrote.", show_default=False)
    ],
    repo_id: Annotated[
        str,
        typer.Option(
            "--repo-id", metavar="ORG/NAME", help="Repository on the Hub; made if it is not there.", show_default=False
        ),
    ],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write OUT/README.md and list what would be sent; no network.")
    ] = False,
    results: Annotated[
        list[Path] | None,
        typer.Option(
            "--results",
            "-r",
            metavar="PATH",
            help="JSON of evaluate or benchmark, or a folder with it; repeatable.",
            show_default=False,
        ),
    ] = None,
    evaluated_as: Annotated[
        list[str] | None,
        typer.Option(
            "--evaluated-as",
            metavar="NAME",
            help="What the results call OUT, if it has moved since.",
            show_default=False,
        ),
    ] = None,
    base_model: Annotated[
        str | None,
        typer.Option(
            "--base-model",
            metavar="ORG/NAME",
            help="The source on the Hub. Default: what the conversion recorded.",
            show_default=False,
        ),
    ] = None,
    licence: Annotated[
        str | None,
        typer.Option(
            "--license",
            metavar="ID",
            help="Such as apache-2.0. Default: what the source's README.md states.",
            show_default=False,
        ),
    ] = None,
    dataset: Annotated[
        list[str] | None,
        typer.Option(
            "--dataset",
            metavar="ORG/NAME",
            help="Dataset on the Hub that OUT was trained on; repeatable.",
            show_default=False,
        ),
    ] = None,
    overwrite_card: Annotated[
        bool, typer.Option("--overwrite-card", help="Rename a README.md that is your own, and write the card.")
    ] = False,
    revision: Annotated[
        str | None, typer.Option("--revision", help="Branch to send to; made if it is not there.", show_default=False)
    ] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request in place of a commit.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a model card and upload OUT to the Hugging Face Hub.

    The card says what is recorded in OUT and measured in the results, and nothing else. Everything is checked before
    anything is written; an upload that was interrupted goes on with the same command, and what has arrived is compared
    by its hash. Nothing on the Hub is deleted. You have to be logged in (hf auth login).

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
        print_json(made)
    elif not quiet:
        show_arrival(made)
