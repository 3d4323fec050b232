"""`gqa-convert publish`."""

from pathlib import Path

from gqa_convert.runtime.messages import size

from .options import Json, option


def publish(
    out: Path = option("OUT", "Folder written by convert or uptrain.", ...),
    repo_id: str = option(
        "--repo-id ORG/NAME", "Repository on the Hub; created if it does not exist.", ...
    ),
    private: bool = option("--private", "Create the repository as private.", False),
    dry_run: bool = option(
        "--dry-run",
        "Write OUT/README.md and list the files to upload, without network access.",
        False,
    ),
    results: list[Path] = option(
        "--results -r FILE", "JSON of evaluate for the card; repeatable.", []
    ),
    base_model: str | None = option(
        "--base-model ORG/NAME",
        "Source model on the Hub. Default: the one that the conversion recorded.",
    ),
    licence: str | None = option(
        "--license ID", "Licence of the result. Default: that in the README.md of the source."
    ),
    as_json: Json = False,
) -> None:
    """Write a model card and upload a converted checkpoint to the Hugging Face Hub.

    You must be logged in (hf auth login). The card states only what OUT records and what the
    results measured. All files are checked and listed before anything is sent. The same command
    resumes an interrupted upload. Nothing on the Hub is deleted.

    Examples:

      gqa-convert publish ./Llama-2-7b-gqa8 --repo-id me/Llama-2-7b-gqa8 --dry-run
      gqa-convert publish ./Llama-2-7b-gqa8 --repo-id me/Llama-2-7b-gqa8 --private \\
        --results evaluation.json
      gqa-convert publish ./gqa8 --repo-id me/gqa8 --base-model org/model --license apache-2.0
    """
    from gqa_convert.errors import printable
    from gqa_convert.hub.publishing import Publication, publish
    from gqa_convert.hub.repository import PublishOptions

    from .console.screen import ProgressScreen, make_console, print_json, say

    console = make_console(stderr=as_json or not dry_run)
    options = PublishOptions(
        repo_id, private, results=results, base_model=base_model, license=licence
    )

    def show_files(publication: Publication) -> None:
        verb = "would send" if dry_run else "sending"
        for file in publication.files:
            console.print(printable(f"{verb}  {file.path}, {size(file.bytes)}"))
        nbytes = sum(file.bytes for file in publication.files)
        console.print(f"total    {len(publication.files)} files, {size(nbytes)}")
        visibility = (
            "private" if publication.private else "public, unless its owner makes it private"
        )
        console.print(f"to       {publication.url}, {visibility}")
        console.print(f"card     {publication.card}")
        for warning in publication.warnings:
            console.print(printable(f"note: {warning}"))

    with ProgressScreen() as screen:
        published = publish(
            out, options, dry_run=dry_run, on_progress=screen.show, on_checked=show_files
        )
    if as_json:
        print_json(published.as_json())
    elif not dry_run:
        say(f"published at {published.url}")
