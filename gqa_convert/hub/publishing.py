"""Publishes a checkpoint: checks everything, writes the card, uploads, and compares the files on the Hub."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from gqa_convert.checkpoint.provenance import PROVENANCE
from gqa_convert.errors import OutputError
from gqa_convert.families.layerwise import heads_text
from gqa_convert.hub.card import make_card
from gqa_convert.hub.converted import open_converted
from gqa_convert.hub.options import PublishOptions
from gqa_convert.hub.repository import HashedFile, Repository, find_changes, hash_file, refuse_token
from gqa_convert.measuring import Progress, no_progress
from gqa_convert.publishing.atomic_files import write_whole
from gqa_convert.publishing.ownership import CARD
from gqa_convert.runtime.json_objects import Result
from gqa_convert.runtime.messages import some
from gqa_convert.runtime.paths import local_path


@dataclass(frozen=True, kw_only=True)
class Publication(Result):
    """What `publish` sent, or would send.

    Attributes:
        repo_id, url: the place on the Hub.
        private: None where a new repository is as its organisation has it, or where that was not looked up.
        commit: on the Hub; None in a dry run and before the upload.
        files: what is sent.
        card: the file of the model card.
        warnings: sentences for the publisher.
        dry_run: whether nothing is sent.
    """

    repo_id: str
    url: str
    private: bool | None
    commit: str | None = None
    files: list[HashedFile]
    card: str
    warnings: list[str]
    dry_run: bool


def publish(
    out: str | Path,
    options: PublishOptions,
    *,
    dry_run: bool = False,
    on_progress: Progress = no_progress,
    on_checked: Callable[[Publication], None] = lambda publication: None,
) -> Publication:
    """Publish a converted checkpoint on the Hub.

    Args:
        out: the folder that convert or uptrain wrote.
        options: where it goes, and what the folder does not say.
        dry_run: write the card and send nothing; no network is used.
        on_progress: called with the name of a stage, the number of files that are read, and of all.
        on_checked: called with what will be sent before anything is.

    Raises:
        GQAConvertError: one of its subclasses; before the card is written unless it is an UploadError.
    """
    from huggingface_hub import get_token

    model = open_converted(local_path(out))
    card, warnings = make_card(model, options)
    token = get_token()
    refuse_token("the model card", card.encode(), token)
    repository = None if dry_run else Repository(options, token)
    private = repository.read(model.files) if repository else options.private or None
    files = []
    for name in model.files:
        files.append(hash_file(model.folder, name, token))
        on_progress("hashing", len(files), len(model.files))
    warnings += find_changes(model, files)
    path = model.folder / CARD
    try:
        write_whole(path, card.encode())
    except OSError as problem:
        raise OutputError(
            f"{path} can't be written ({problem.strerror}): make room, or the folder writable"
        ) from None
    files.append(hash_file(model.folder, CARD, token))
    if model.names.local:
        named = next(iter(model.names.local))
        warnings.append(
            f"{PROVENANCE} is published too and names folders of this machine: {named}; the card does not"
        )
    if links := model.checkpoint.files.links_out:
        warnings.append(f"not sent, as links that lead out of the folder: {some(links)}")
    if model.untracked:
        warnings.append(
            f"not sent, as neither convert nor uptrain wrote it: {some(model.untracked)}"
        )
    publication = Publication(
        repo_id=options.repo_id,
        url=options.url,
        private=private,
        files=sorted(files, key=lambda file: file.path),
        warnings=warnings,
        card=str(path),
        dry_run=dry_run,
    )
    on_checked(publication)
    if repository is None:
        return publication
    message = f"Upload a conversion to {heads_text(model.record.groups)} K/V heads per layer"
    return replace(publication, commit=repository.upload(model.folder, files, message))
