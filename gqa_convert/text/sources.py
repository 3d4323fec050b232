"""Where text comes from: local files, Hub datasets, and Python's own standard library.

A source of files is read once from its beginning to its end; a Hub dataset is a stream of rows that may never end.
"""

import glob
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from gqa_convert.checkpoint.paths import local_path
from gqa_convert.errors import DataError
from gqa_convert.text.hub_rows import HubText, commit_of
from gqa_convert.text.stdlib_text import source_files
from gqa_convert.text.text_files import SUFFIXES, FileText, kind_of

STDLIB = "python-stdlib"
HELD_OUT = "python-stdlib:held-out"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class Source:
    """Where text comes from, as a recipe says it.

    Attributes:
        source: a file, a folder, a pattern with `*`, the id of a Hub dataset, or `python-stdlib`.
        weight: its share of the samples, relative to those of the other sources.
        text_field: the field or column that holds the text, in JSON lines, Parquet files and Hub datasets.
        split: of a Hub dataset.
        name: the configuration of a Hub dataset.
        revision: branch, tag or commit of a Hub dataset.
        source_field: for pairs of texts, the field of what an encoder reads.
        target_field: the field of what its decoder is to write.
        source_language: where the tokenizer marks languages, that of the texts that are read, as the tokenizer writes
            it.
        target_language: that of the texts that are to be written.
    """

    source: str
    weight: float = 1.0
    text_field: str = "text"
    split: str = "train"
    name: str | None = None
    revision: str | None = None
    source_field: str | None = None
    target_field: str | None = None
    source_language: str | None = None
    target_language: str | None = None


def as_source(given: object) -> Source:
    """A source from what a recipe holds: a string, a mapping, or an object with the same attributes."""
    if isinstance(given, Source):
        return given
    if isinstance(given, str):
        return Source(given)
    names = [field.name for field in fields(Source)]
    if isinstance(given, Mapping):
        if unknown := sorted(str(key) for key in given if key not in names):
            raise DataError(f"a data source has no key {unknown[0]!r}: its keys are {', '.join(names)}")
        if "source" not in given:
            raise DataError(
                f"a data source says nothing about where it is: give it the key `source` beside {sorted(map(str, given))}"
            )
        return Source(**given)
    return Source(**{name: getattr(given, name) for name in names})


def open_source(source: Source, memory: Path, *, ask: bool = True) -> FileText | HubText:
    """What a source stands for; nothing is read yet.

    Args:
        source: as the recipe says it.
        memory: the folder that remembers the commits of Hub datasets.
        ask: ask the Hub for the commit of a dataset, even if one is remembered.

    Raises:
        DataError: there is no such file or dataset, a pattern fits nothing, or local files are given what only a
            dataset on the Hub has.
    """
    given = source.source
    if not given:
        raise DataError("a data source is empty: name a file, a folder, a pattern or a dataset on the Hub")
    if given in (STDLIB, HELD_OUT):
        _refuse_hub_keys(source)
        return FileText(given, _found(source_files(given == HELD_OUT), given), source.text_field, lenient=True)
    path = local_path(given)
    if path.exists() or glob.has_magic(given):
        _refuse_hub_keys(source)
    if path.is_file():
        return FileText(given, [path], source.text_field)
    if path.is_dir():
        return FileText(
            given, _found([file for file in sorted(path.rglob("*")) if _is_text(file)], given), source.text_field
        )
    if glob.has_magic(given):
        files = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]  # noqa: PTH207  # patterns may begin with /
        return FileText(given, _found([file for file in files if file.is_file()], given), source.text_field)
    if given.startswith((".", "/", "~")) or kind_of(path) in SUFFIXES or not _HUB_ID.fullmatch(given):
        raise DataError(
            f"{given} does not exist: name a file, a folder, a pattern such as 'texts/*.jsonl', or a dataset on the Hub"
        )
    commit = commit_of(given, source.revision, memory, ask=ask)
    return HubText(given, commit, source.name, source.split, source.text_field)


def _refuse_hub_keys(source: Source) -> None:
    """What only a dataset on the Hub has would be ignored."""
    unused = Source(source.source)
    for key in ("split", "name", "revision"):
        if getattr(source, key) != getattr(unused, key):
            raise DataError(
                f"{source.source} is on this machine, and {key} = {getattr(source, key)!r} belongs to datasets on the Hub: leave {key} out"
            )


def _is_text(path: Path) -> bool:
    return path.is_file() and kind_of(path) in SUFFIXES


def _found(files: list[Path], given: str) -> list[Path]:
    if not files:
        raise DataError(f"{given} holds no text files: name a pattern that fits some, such as 'texts/*.jsonl'")
    return files
