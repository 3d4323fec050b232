"""Whose a file is: what this program wrote may be replaced; everything else is its user's, and is neither deleted nor
overwritten.

The record that lies in every result lists the files written with it. A file that is not listed, or that is newer than
the record and not what the record says, is the user's. Results of versions whose records have no list are judged by the
names of their source's files.
"""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint import formats
from gqa_convert.checkpoint.signed_card import CARD, is_our_card
from gqa_convert.checkpoint.strict_json import parse_object
from gqa_convert.errors import CorruptCheckpointError

RECORD = "gqa_conversion.json"
"""Lies in every converted checkpoint and says how it was made."""

RESTATED = "gqa_restated.json"
"""Lies in every restated checkpoint instead."""

WRITTEN = "written"
"""The record's list of files: `{name: {"bytes": ..., "sha256": ...}}`."""

_CONFIG = "config.json"
_NAMED = 3
"""Files that a message names; the others it counts."""

Entries = Mapping[str, Any]


def list_written(folder: Path, result: Mapping[str, Any] | None = None) -> dict[str, dict[str, Any]]:
    """What the record says of the files in a new result: their sizes, and the SHA-256 of all but weights.

    Args:
        folder: with everything in it but the record, which is written last.
        result: the record's `{"files": {name: {"bytes": ..., "sha256": ...}}}` of weight files, if their hashes are
            known.
    """
    listed: dict[str, dict[str, Any]] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        known = (result or {"files": {}})["files"].get(name)
        if known is not None:
            listed[name] = dict(known)
        elif path.suffix == ".safetensors":
            listed[name] = {"bytes": path.stat().st_size}
        else:
            listed[name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    return listed


def foreign_files(folder: Path) -> list[str]:
    """The files in a folder that are not part of a result of this program, by their paths in it; a folder without any
    of ours ends in `/`.
    """
    record = next(
        (name for name in (RECORD, RESTATED) if (folder / name).is_file() and not (folder / name).is_symlink()), None
    )
    ours = _entries(folder, record) if record else {}
    if record is None or not ours:
        return sorted(
            f"{path.name}/" if path.is_dir() and not path.is_symlink() else path.name for path in folder.iterdir()
        )
    return list(
        _foreign(folder, "", record, ours, {parent.as_posix() for name in ours for parent in Path(name).parents})
    )


def _foreign(folder: Path, inside: str, record: str, ours: Entries, homes: set[str]) -> Iterator[str]:
    for path in sorted((folder / inside).iterdir()):
        name = f"{inside}{path.name}"
        if path.is_symlink():
            yield name
        elif path.is_dir():
            if name in homes:
                yield from _foreign(folder, f"{name}/", record, ours, homes)
            else:
                yield f"{name}/"
        elif (
            name != record
            and not (name in ours and _is_unchanged(path, ours[name], folder / record))
            and not _is_card(path, name)
        ):
            yield name


def _is_unchanged(path: Path, known: Mapping[str, Any], record: Path) -> bool:
    """Every file was complete before the record was written, so that a later one is ours only if it has the hash that
    was recorded.
    """
    status = path.stat()
    if known.get("bytes") not in (None, status.st_size):
        return False
    if status.st_mtime_ns <= record.stat().st_mtime_ns:
        return True
    return known.get("sha256") is not None and known["sha256"] == _sha256(path)


def _is_card(path: Path, name: str) -> bool:
    """Whether a file is a model card of `publish`, which comes later than the record."""
    try:
        return name == CARD and is_our_card(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def _entries(folder: Path, name: str) -> dict[str, dict[str, Any]]:
    """The files of a result, by name; none if its record can't be understood."""
    record = _read(folder / name)
    listed = record.get(WRITTEN)
    if listed is None and name == RECORD:
        return _older_entries(folder, record)
    return (
        {name: entry for name, entry in listed.items() if isinstance(entry, dict)} if isinstance(listed, dict) else {}
    )


def _older_entries(folder: Path, record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Of a record without a list: what a conversion copies of its source's files, and what it writes itself."""
    entries: dict[str, dict[str, Any]] = {}
    for name, entry in _part(_part(record, "source"), "files").items():
        if not formats.is_weight_file(name):
            entries[name] = {"sha256": entry.get("sha256")} if isinstance(entry, dict) else {}
    if not entries:
        return {}
    entries |= {_CONFIG: {}, "tokenizer_config.json": {}, formats.SAFETENSORS_SINGLE: {}}
    config, index = _read(folder / _CONFIG), _read(folder / formats.SAFETENSORS_INDEX)
    shards = {file for file in _part(index, "weight_map").values() if isinstance(file, str)}
    entries |= {name: {} for name in (*shards, *([formats.SAFETENSORS_INDEX] if shards else []))}
    for home in _part(config, "auto_map").values():
        if isinstance(home, str) and home.startswith("gqa_"):
            entries[f"{home.split('.')[0]}.py"] = {}
    for name, entry in _part(_part(record, "result"), "files").items():
        if name in entries and isinstance(entry, dict):
            entries[name] = {"bytes": entry.get("bytes"), "sha256": entry.get("sha256")}
    return entries


def _part(record: Mapping[str, Any], key: str) -> dict[str, Any]:
    part = record.get(key)
    return part if isinstance(part, dict) else {}


def _read(path: Path) -> dict[str, Any]:
    try:
        return parse_object(path.read_bytes(), str(path))
    except (OSError, CorruptCheckpointError):
        return {}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def some(names: list[str]) -> str:
    """The first of some names, and how many there are beside them."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def set_aside(path: Path) -> Path:
    """Give a file that is not ours another name, so that its own is free and nothing is lost.

    Raises:
        OSError: it can't be renamed.
    """
    number = 0
    while True:
        aside = path.with_name(f"{path.name}.old{number or ''}")
        if not aside.exists() and not aside.is_symlink():
            path.rename(aside)
            return aside
        number += 1
