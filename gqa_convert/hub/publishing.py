"""Publishes a checkpoint: checks everything, writes the card, and uploads."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

from gqa_convert.checkpoint.formats import is_weight_file
from gqa_convert.checkpoint.provenance import PROVENANCE
from gqa_convert.errors import PublishError
from gqa_convert.families.layerwise import heads_text
from gqa_convert.measuring import Progress, no_progress
from gqa_convert.publishing import ownership
from gqa_convert.publishing.atomic_files import write_whole
from gqa_convert.publishing.ownership import CARD
from gqa_convert.runtime.json_objects import Result
from gqa_convert.runtime.messages import some
from gqa_convert.runtime.paths import local_path

from .card import make_card
from .converted import Converted, open_converted
from .repository import PublishOptions, Repository

_SMALL_BYTES = 32 << 20
"""Files up to this size are searched for access tokens."""
_TOKEN = re.compile(rb"\bhf_[A-Za-z0-9]{30,}")


@dataclass(frozen=True)
class HashedFile:
    """A file that is sent."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Publication(Result):
    """What `publish` sent, or would send.

    Attributes:
        repo_id, url: the place on the Hub.
        private: None where a new repository is as its organisation has it, or where that was not
            looked up.
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
    on_checked: Callable[[Publication], None] = no_progress,
) -> Publication:
    """Publish a converted checkpoint on the Hub.

    Args:
        out: the folder that convert or uptrain wrote.
        options: where it goes, and what the folder does not say.
        dry_run: write the card and send nothing; no network is used.
        on_progress: called with the name of a stage, the number of files that are read, and of all.
        on_checked: called with what will be sent before anything is.

    Raises:
        GQAConvertError: one of its subclasses; before the card is written unless it is an
            UploadError.
    """
    from huggingface_hub import get_token

    # what is sent, as far as it is known without reading every file
    model = open_converted(local_path(out))
    card, warnings = make_card(model, options)
    token = get_token()
    _refuse_token("the model card", card.encode(), token)
    # the repository before the files, whose hashes may take minutes
    repository = None if dry_run else Repository(options, token)
    private = repository.read(model.files) if repository else options.private or None
    files = []
    for name in model.files:
        files.append(_hash_file(model.folder, name, token))
        on_progress("hashing", len(files), len(model.files))
    warnings += [*_changes(model, files), *_notes(model)]
    # the card is the only thing that changes in the folder
    path = model.folder / CARD
    write_whole(path, card.encode())
    files.append(_hash_file(model.folder, CARD, token))
    publication = Publication(
        repo_id=options.repo_id,
        url=options.url,
        private=private,
        files=sorted(files, key=attrgetter("path")),
        warnings=warnings,
        card=str(path),
        dry_run=dry_run,
    )
    on_checked(publication)
    if repository is None:
        return publication
    heads = heads_text(model.record["kv_heads"])
    message = f"Upload a conversion to {heads} K/V heads per layer"
    commit = repository.upload(model.folder, [*model.files, CARD], message)
    return replace(publication, commit=commit)


def _refuse_token(where: str, content: bytes, token: str | None) -> None:
    """Raise PublishError for an access token of the Hub: the user's, or one that is known by its
    form.
    """
    if _TOKEN.search(content) or (token and token.encode() in content):
        raise PublishError(
            f"{where} holds an access token of the Hub: "
            "take it out of what was recorded, and revoke it"
        )


def _hash_file(folder: Path, name: str, token: str | None) -> HashedFile:
    """Read a file, and refuse it if it holds an access token."""
    path = folder / name
    content = path.read_bytes() if path.stat().st_size <= _SMALL_BYTES else b""
    if not is_weight_file(name):
        _refuse_token(str(path), content, token)
    return HashedFile(name, **ownership.hash_file(path))


def _changes(model: Converted, files: Sequence[HashedFile]) -> list[str]:
    """Warnings about files that changed since convert or uptrain wrote them, and about weights of
    which that is unknown.

    Raises:
        PublishError: weights have changed.
    """
    changed, unknown = [], []
    for file in files:
        written = model.record["written"].get(file.path, {"sha256": file.sha256})
        if "sha256" not in written:
            unknown.append(file.path)
        elif written["sha256"] != file.sha256:
            changed.append(file.path)
    if weights := [name for name in changed if is_weight_file(name)]:
        raise PublishError(
            f"{model.folder / weights[0]} has changed since it was written: "
            "convert or copy it again"
        )
    warnings = []
    if changed:
        warnings.append(f"changed since the conversion: {some(changed)}")
    if unknown:
        warnings.append(
            f"{some(unknown)}: their hashes were not recorded, so changes since then would go "
            f"unnoticed: check with gqa-convert verify {model.folder} --source SOURCE"
        )
    return warnings


def _notes(model: Converted) -> list[str]:
    """What the publisher may not expect: folders that the record names, and files that stay."""
    notes = []
    if model.names_folders:
        notes.append(
            f"{PROVENANCE} is published too and names folders of this machine; the card does not"
        )
    if links := model.checkpoint.files.links_out:
        notes.append(f"not sent, as links that lead out of the folder: {some(links)}")
    if model.untracked:
        notes.append(f"not sent, as neither convert nor uptrain wrote it: {some(model.untracked)}")
    return notes
