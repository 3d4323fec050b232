"""Publishes a checkpoint: checks everything, writes the card, uploads, and compares the files on the Hub."""

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gqa_convert.checkpoint import formats
from gqa_convert.checkpoint.paths import local_path
from gqa_convert.checkpoint.provenance import PROVENANCE
from gqa_convert.checkpoint.results import Result, plain
from gqa_convert.checkpoint.strict_json import JsonObject
from gqa_convert.errors import OptionError, PublishError
from gqa_convert.measuring.results.kv_heads import in_words
from gqa_convert.publishing.card import Subject, card_text
from gqa_convert.publishing.facts import README, Base, Facts, read_facts
from gqa_convert.publishing.hashing import Digest, digest_of, digests, refuse_tokens
from gqa_convert.publishing.licences import duties, find_licence
from gqa_convert.publishing.markup import folders_in, some
from gqa_convert.publishing.measurements import read_measurements
from gqa_convert.publishing.metadata import card_data_of
from gqa_convert.publishing.readme import check_replaceable, read_readme, sign, stated_by_source, write_card
from gqa_convert.publishing.remote import Place, Repository, check_place, check_weights, differs, own_token

if TYPE_CHECKING:
    from huggingface_hub import ModelCard

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)

Reading = Callable[[int], AbstractContextManager[Callable[[int], None]]]
"""Called with the number of bytes to read; yields a function that is called with the bytes that were read."""


@dataclass(frozen=True)
class Options:
    """Facts about the model that its folder does not hold.

    Attributes:
        results: files of evaluate and benchmark, or folders with them.
        names: of the model in the results, besides its path.
        base_model: id on the Hub of the model that it was made from.
        licence: identifier of the Hub.
        datasets: ids on the Hub of the training data.
        overwrite_card: rename a README.md that the user wrote to README.md.old, rather than refuse.
    """

    results: tuple[Path, ...] = ()
    names: tuple[str, ...] = ()
    base_model: str | None = None
    licence: str | None = None
    datasets: tuple[str, ...] = ()
    overwrite_card: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication(Result):
    """What `publish` sent, or would send.

    Attributes:
        repo_id, url, revision: the place on the Hub.
        commit, pull_request: on the Hub; None in a dry run and before the upload.
        files: what is sent, by path.
        replaced: paths whose content on the Hub differs; None in a dry run.
        card: the file of the model card.
        warnings: sentences for the publisher.
        dry_run: whether nothing is sent.
    """

    repo_id: str
    url: str
    revision: str | None
    commit: str | None = None
    pull_request: str | None = None
    files: tuple[Digest, ...]
    replaced: tuple[str, ...] | None
    card: str
    warnings: tuple[str, ...]
    dry_run: bool

    def as_json(self) -> JsonObject:
        files = [{"path": each.path, "bytes": each.size, "sha256": each.sha256} for each in self.files]
        content: JsonObject = plain(self)
        return content | {"files": files}


def publish(
    out: str | Path,
    place: Place,
    options: Options | None = None,
    *,
    dry_run: bool = False,
    reading: Reading = lambda nbytes: nullcontext(lambda count: None),
    on_checked: Callable[[Publication], None] = lambda result: None,
) -> Publication:
    """Publish a converted checkpoint on the Hub.

    Args:
        out: the folder that convert or uptrain wrote.
        place: the repository.
        options: facts that the folder does not hold.
        dry_run: write the card and send nothing; no network is used.
        reading: shows the progress of hashing the files.
        on_checked: called with the result before anything is sent.

    Raises:
        GQAConvertError: one of its subclasses; before the card is written unless it is an UploadError.
    """
    options = options or Options()
    check_place(place)
    _check(options)
    facts = read_facts(local_path(out))
    token = own_token()
    repository = None if dry_run else Repository(place, token)
    card, warnings = make_card(facts, place, options)
    refuse_tokens(facts.folder, facts.files, token, card.content)
    there = repository.look() if repository else None
    if there is not None:
        warnings += check_weights(place, there, [*facts.files, README])
    if repository is not None:
        warnings += repository.check_card(card)
    with reading(sum(facts.checkpoint.sizes[name] for name in facts.files)) as progress:
        files = sorted(
            [*digests(facts.folder, facts.files, progress), digest_of(README, card.content.encode())],
            key=lambda each: each.path,
        )
    warnings += [*_unrecorded(facts, files), *_strayed(facts, files)]
    replaced = (each.path for each in files if there and each.path in there and differs(there[each.path], each))
    result = Publication(
        repo_id=place.repo_id,
        url=place.url,
        revision=place.revision,
        files=tuple(files),
        replaced=None if dry_run else tuple(replaced),
        card=str(write_card(facts, card.content)),
        warnings=tuple(warnings),
        dry_run=dry_run,
    )
    on_checked(result)
    if repository is not None:
        commit = repository.send(facts.folder, [each.path for each in files], _message(facts))
        repository.check_arrived(str(commit.oid), files)
        return replace(result, commit=str(commit.oid), pull_request=commit.pr_url)
    return result


def make_card(facts: Facts, place: Place, options: Options) -> tuple["ModelCard", list[str]]:
    """The card, and warnings for the publisher.

    Raises:
        PublishError: the folder has a README.md that must not be replaced.
    """
    from huggingface_hub import ModelCard

    readme = read_readme(facts.folder)
    check_replaceable(facts, readme, overwrite=options.overwrite_card)
    stated = stated_by_source(facts, readme)
    licence, warnings = find_licence(stated, options.licence)
    said, more = duties(licence, place.repo_id)
    measured = read_measurements([local_path(each) for each in options.results], facts, [place.repo_id, *options.names])
    base, unknown = _base(facts, options.base_model)
    warnings = [*warnings, *more, *measured.warnings, *unknown, *_paths(facts)]
    data = card_data_of(
        facts, place.repo_id, base.repo_id if base else None, licence, measured, stated, _datasets(facts, options)
    )
    branch = None if (place.revision or "").startswith("refs/") else place.revision
    subject = Subject(facts, place.repo_id, base, licence, tuple(said), measured, branch)
    if facts.checkpoint.links_out:
        warnings.append(f"not sent, as links that lead out of the folder: {some(facts.checkpoint.links_out)}")
    if facts.strangers:
        warnings.append(f"not sent, as neither convert nor uptrain wrote it: {some(facts.strangers)}")
    front = f"---\n{data.to_yaml(line_break=chr(10))}\n---\n"
    return ModelCard(sign(front, card_text(subject), stated), ignore_metadata_errors=True), warnings


def _check(options: Options) -> None:
    for option, names in (
        ("--base-model", [] if options.base_model is None else [options.base_model]),
        ("--dataset", options.datasets),
    ):
        for name in names:
            if not _HUB_ID.fullmatch(name):
                raise OptionError(f"{option} {name!r} is not an id of the Hub: write it like org/name")


def _base(facts: Facts, given: str | None) -> tuple[Base | None, list[str]]:
    known = facts.base
    if known is not None and not _HUB_ID.fullmatch(known.repo_id):
        known = None
    if given is None:
        return known, [] if known else ["it is not known whether the source is on the Hub: if it is, give --base-model"]
    if known is not None and known.repo_id == given:
        return known, []
    return Base(given, None), [
        f"--base-model {given} replaces {known.repo_id}, which {PROVENANCE} names"
    ] if known else []


def _datasets(facts: Facts, options: Options) -> tuple[str, ...]:
    """Ids on the Hub of the training data: those that the user names, and sources of recipes with options that only the
    Hub has.
    """
    found = list(options.datasets)
    for training in facts.trainings:
        for source in training.recipe.data if training.recipe else ():
            name = source.source or ""
            if (source.name or source.revision) and _HUB_ID.fullmatch(name) and name not in found:
                found.append(name)
    return tuple(found)


def _paths(facts: Facts) -> list[str]:
    """A warning if the published record names folders of this machine."""
    local = folders_in((facts.folder / PROVENANCE).read_text(encoding="utf-8"))
    return (
        [f"{PROVENANCE} is published too and names folders of this machine such as {local}; the card does not"]
        if local
        else []
    )


def _unrecorded(facts: Facts, files: Sequence[Digest]) -> list[str]:
    """A warning about weights whose hash was not recorded when they were written.

    Raises:
        PublishError: a weight file is not the one that was written.
    """
    unknown = []
    for each in files:
        if formats.is_weight_file(each.path):
            written = facts.written_digest(each.path)
            if written is None:
                unknown.append(each.path)
            elif written != each.sha256:
                raise PublishError(
                    f"{facts.folder / each.path} has SHA-256 {each.sha256} where {written} was written: it has changed since; convert or copy "
                    "it again"
                )
    hint = f"their hashes were not recorded, so changes since then would go unnoticed: check with gqa-convert verify {facts.folder} --source SOURCE"
    return [f"{some(unknown)}: {hint}"] if unknown else []


def _strayed(facts: Facts, files: Sequence[Digest]) -> list[str]:
    """A warning about files that came from the source and have changed since."""
    changed = [
        each.path
        for each in files
        if each.path not in (README, "config.json", PROVENANCE, "tokenizer_config.json")
        and (known := facts.source_digest(each.path))
        and each.sha256 not in known
        and not each.path.endswith((".safetensors", ".index.json", ".py"))
    ]
    return [f"changed since the conversion, or by it: {', '.join(changed)}"] if changed else []


def _message(facts: Facts) -> str:
    return f"Upload a conversion to {in_words(facts.groups)} K/V heads per layer"
