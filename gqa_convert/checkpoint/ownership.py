"""Whose a file is: what this program wrote may be replaced; everything else is its user's, and is neither deleted nor overwritten.

The record that lies in every result lists the files written with it. A file that is not listed, or that is newer than the record and not
what the record says, is the user's. Results of versions whose records have no list are judged by the names of their source's files.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint import formats
from gqa_convert.checkpoint.signed_card import CARD, is_our_card
from gqa_convert.checkpoint.strict_json import parse_object
from gqa_convert.errors import CorruptCheckpointError

RECORD = "gqa_conversion.json"
"""Lies in every result and says how it was made."""

WRITTEN = "written"
"""The record's list of files: `{name: {"bytes": ..., "sha256": ...}}`."""

_CONFIG = "config.json"
_NAMED = 3
"""Files that a message names; the others it counts."""

Entries = Mapping[str, Any]


def list_written(folder: Path, digests: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """What the record says of the files in a new result: their sizes, and SHA-256 of all but weights.

    Args:
        folder: with everything in it but the record.
        digests: SHA-256 of weight files, for as many as are known.
    """
    listed: dict[str, dict[str, Any]] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != RECORD):
        name = path.relative_to(folder).as_posix()
        listed[name] = {"bytes": path.stat().st_size}
        digest = (digests or {}).get(name) if path.suffix == ".safetensors" else _sha256(path)
        if digest:
            listed[name]["sha256"] = digest
    return listed


def foreign_files(folder: Path) -> list[str]:
    """The files in a folder that are not part of a result of this program, by their paths in it; a folder without any of ours ends in `/`."""
    record = folder / RECORD
    ours = _entries(folder) if record.is_file() and not record.is_symlink() else {}
    kept = {RECORD, *ours} if ours else set()
    homes = {parent.as_posix() for name in kept for parent in Path(name).parents}
    return list(_foreign(folder, "", ours, kept, homes))


def _foreign(folder: Path, inside: str, ours: Entries, kept: set[str], homes: set[str]) -> Iterator[str]:
    with os.scandir(folder / inside) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        name = f"{inside}{entry.name}"
        if entry.is_dir(follow_symlinks=False):
            if name in homes:
                yield from _foreign(folder, f"{name}/", ours, kept, homes)
            else:
                yield f"{name}/"
        elif entry.is_symlink() or not ((name in kept and _is_unchanged(folder, name, ours)) or (name == CARD and kept and _is_card(folder))):
            yield name


def _is_unchanged(folder: Path, name: str, ours: Entries) -> bool:
    """Every file was complete before the record was written, so that a later one is ours only if it has the hash that was recorded."""
    if name == RECORD:
        return True
    known, status = ours[name], (folder / name).stat()
    if known.get("bytes") not in (None, status.st_size):
        return False
    if status.st_mtime_ns <= (folder / RECORD).stat().st_mtime_ns:
        return True
    return known.get("sha256") is not None and known["sha256"] == _sha256(folder / name)


def _is_card(folder: Path) -> bool:
    """Whether README.md is a model card of `publish`, which comes later than the record."""
    try:
        return is_our_card((folder / CARD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def _entries(folder: Path) -> dict[str, dict[str, Any]]:
    """The files of a result, by name; none if its record can't be understood."""
    try:
        record = parse_object((folder / RECORD).read_bytes(), RECORD)
    except (OSError, CorruptCheckpointError):
        return {}
    listed = record.get(WRITTEN)
    if listed is None:
        return _older_entries(folder, record)
    return {name: entry for name, entry in listed.items() if isinstance(entry, dict)} if isinstance(listed, dict) else {}


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
