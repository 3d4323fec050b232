"""Sources of text: local files, Hub datasets, and Python's standard library."""

import glob
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator
from pydantic.dataclasses import dataclass

from gqa_convert.errors import DataError
from gqa_convert.runtime.json_objects import JsonObject
from gqa_convert.runtime.paths import local_path

from .files import SUFFIXES, Fields, Files, Row, kind_of
from .folders import data_files, source_files
from .hub import HubDataset, commit_of
from .keys import CONFIG, PathText, Real, Text, declared_in, fields_of, read_keys

STDLIB = "python-stdlib"
HELD_OUT = "python-stdlib:held-out"
SELF = "self"
"""The text that a model writes itself."""
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
_HUB_KEYS = ("split", "name", "revision")

DatasetCommits = dict[str, str]
"""Commits by dataset and revision, such as `org/some@main`."""


PAIR_FIELDS = ("source", "target")
"""Of rows that hold pairs, where nothing is stated."""
TextSource = Files | HubDataset
SourceKind = Literal["text", "chat", "pairs"]
KINDS: dict[SourceKind, str] = {
    "text": "running text",
    "chat": "conversations",
    "pairs": "pairs of texts (source_field and target_field)",
}
"""What a source holds, as far as its keys state it, in words. `text` is whatever files hold that
are named alone.
"""


@dataclass(frozen=True, config=CONFIG)
@declared_in(Path(__file__).with_suffix(".toml"))
class Source:
    """Where text comes from, as a recipe states it; `sources.toml` says what the keys mean."""

    source: PathText
    weight: Real
    text_field: Text
    split: Text
    name: Text | None
    revision: Text | None
    source_field: Text | None
    target_field: Text | None
    format: Literal["auto", "text", "chat"]

    @property
    def kind(self) -> SourceKind:
        """What the source holds, as far as its keys state it; files of format `auto` may hold
        conversations.
        """
        if self.source_field is not None:
            return "pairs"
        return "chat" if self.format == "chat" else "text"

    def stated(self) -> JsonObject:
        """The values that are not the defaults."""
        return {
            name: value
            for name, value in asdict(self).items()
            if value != fields_of(Source)[name].default
        }


def _read_source(item: Any) -> Any:
    if isinstance(item, Source | Mapping):
        return item
    return {"source": str(item) if isinstance(item, Path) else item}


def _read_list(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        return [value]
    if not value:
        raise ValueError("it is an empty list: name at least one file, glob or Hub data set")
    return value


Sources = Annotated[
    tuple[Annotated[Source, BeforeValidator(_read_source)], ...], BeforeValidator(_read_list)
]
"""One source or a list of them, each a text or a mapping."""


def as_source(given: object) -> Source:
    """A source from a `Source`, a string, a path or a mapping.

    Raises:
        DataError: it is none of these, or a key of it is unknown or not allowed.
    """
    try:
        return read_keys(Source, _read_source(given))
    except ValueError as problem:
        raise DataError(f"the data source: {problem}") from None


def is_self(source: Any) -> bool:
    """Whether a source, as a user gave it, is the text of the model itself. A file of this name
    comes first.
    """
    return isinstance(source, str) and source == SELF and not local_path(SELF).exists()


def open_source(source: Source) -> TextSource:
    """Resolve a source to files or a Hub dataset, without reading it.

    Raises:
        DataError: the file or dataset does not exist, a pattern matches nothing, a folder has no
            such split, or a key that only applies to Hub datasets is given for local files.
    """
    given = source.source
    path = local_path(given)
    if is_on_hub(source):
        return HubDataset(given, commit_of(given, source.revision), source.name, source.split)
    is_stdlib = given in (STDLIB, HELD_OUT)
    if not (is_stdlib or path.exists() or glob.has_magic(given)):
        raise DataError(
            f"{given} does not exist: name a file, a folder, a pattern such as 'texts/*.jsonl', or "
            "a dataset on the Hub"
        )
    stated = source.stated()
    if path.is_dir():
        stated.pop("split", None)
    for name in _HUB_KEYS:
        if name in stated:
            raise DataError(
                f"{given} is a local source, and {name} = {stated[name]!r} only applies to "
                f"datasets on the Hub: remove {name}"
            )
    if is_stdlib:
        files = source_files(given == HELD_OUT)
    else:
        files = [path] if path.is_file() else data_files(path, SUFFIXES, source.split)
    if not files:
        raise DataError(
            f"{given} holds no text files: name a pattern that matches some, such as "
            "'texts/*.jsonl'"
        )
    return Files(given, files, lenient=is_stdlib)


def first_row(text: TextSource) -> Row:
    """The first row of a text; empty for plain text, and where it can't be read."""
    with suppress(Exception):  # what is wrong with the text is explained when it is read
        row: Row = next(text.pieces(Fields((), "row"))).text
        return row
    return {}


def with_pairs(source: Source) -> Source:
    """A source that states no fields, with those of pairs where its first row has them and no
    running text.
    """
    row = first_row(open_source(source))
    if source.source_field or source.text_field in row or not row.keys() >= {*PAIR_FIELDS}:
        return source
    return replace(source, source_field=PAIR_FIELDS[0], target_field=PAIR_FIELDS[1])


def is_on_hub(source: Source) -> bool:
    """Whether a source is named like a Hub dataset and is no local file."""
    given = source.source
    if given == STDLIB or is_self(given) or not _HUB_ID.fullmatch(given):
        return False
    path = local_path(given)
    return kind_of(path) not in SUFFIXES and not path.exists()


def find_commits(sources: Iterable[Source], known: Mapping[str, str]) -> DatasetCommits:
    """The commit of every Hub dataset among the sources, which a run looks up once and keeps,
    although branches move.

    Args:
        sources: the sources of text; local ones have no commit.
        known: commits that are kept; the Hub is queried for the others only.

    Raises:
        DataError: a dataset or revision does not exist, or the Hub can't be reached.
    """
    return {
        _reference(source): known.get(_reference(source))
        or commit_of(source.source, source.revision)
        for source in sources
        if is_on_hub(source)
    }


def pinned(sources: Iterable[Source], commits: Mapping[str, str]) -> tuple[Source, ...]:
    """The sources with the commits of their Hub datasets as revisions, as far as the commits are
    known.
    """
    return tuple(
        replace(source, revision=commits.get(_reference(source), source.revision))
        for source in sources
    )


def _reference(source: Source) -> str:
    return f"{source.source}@{source.revision or 'main'}"
