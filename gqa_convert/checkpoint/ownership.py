"""Decide which files this program wrote and may replace; all other files belong to the user and are never deleted or
overwritten.

The record in every result lists the files that were written with it, with their SHA-256. Weights that a method streams
from disk to disk are not hashed, because that would take longer than the conversion. For them, the record has the time
of the last change of the file's inode, which the system sets and nobody can set back: a file that was copied or moved
here, or written to, has another one. A file that is not proven to be the listed one belongs to the user.
"""

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from gqa_convert.checkpoint.signed_card import CARD, is_our_card
from gqa_convert.checkpoint.strict_json import JsonObject, parse_object
from gqa_convert.errors import CorruptCheckpointError

RECORD = "gqa_conversion.json"
"""The file in every converted checkpoint that records how it was made."""

WRITTEN = "written"
"""The record's list of files: `{name: {"bytes": ..., "sha256": ...}}`, see `list_written`."""

_NAMED = 3
"""Number of files that a message names; it counts the rest."""


def list_written(folder: Path, result: JsonObject | None) -> dict[str, JsonObject]:
    """Return the record's list of files in a new result: the size and SHA-256 of each, or for weights whose hash is not
    known the size and the time of the last change.

    Args:
        folder: the complete result without the record, which is written last. Its weights are closed and do not change
            any more.
        result: `{"files": {name: {"bytes": ..., "sha256": ...}}}` of the weight files, if their hashes are known.
    """
    known = {} if result is None else result["files"]
    listed = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if name not in known and path.suffix == ".safetensors":
            status = path.stat()
            listed[name] = {"bytes": status.st_size, "changed_ns": status.st_ctime_ns}
        else:
            listed[name] = known.get(name) or hash_file(path)
    return listed


def hash_files(folder: Path, names: Iterable[str]) -> dict[str, JsonObject]:
    """The sizes and SHA-256 of files by their names, sorted."""
    return {name: hash_file(folder / name) for name in sorted(names)}


def hash_file(path: Path) -> JsonObject:
    """The size and the SHA-256 of a file, which is read whole: `{"bytes": ..., "sha256": ...}`."""
    with path.open("rb") as file:
        return {
            "bytes": path.stat().st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }


def foreign_files(folder: Path) -> list[str]:
    """Return the files in a folder that this program did not write, as relative paths."""
    ours = _read_listed(folder)
    found = []
    for root, folders, names in os.walk(folder, onerror=_raise):
        links = [name for name in folders if Path(root, name).is_symlink()]
        for path in sorted(Path(root, name) for name in links + names):
            name = path.relative_to(folder).as_posix()
            is_ours = False
            if ours and path.is_file() and not path.is_symlink():
                # `publish` writes a model card after the record
                is_card = name == CARD and is_our_card(path.read_text("utf-8", "surrogateescape"))
                is_ours = is_card or name == RECORD or is_unchanged(path, ours.get(name, {}))
            if not is_ours:
                found.append(name)
    return found


def _raise(problem: OSError) -> NoReturn:
    raise problem


def _read_listed(folder: Path) -> JsonObject:
    """Return the files that the record of a result lists, by name; none if there is no readable record."""
    record = folder / RECORD
    try:
        listed = (
            None if record.is_symlink() else parse_object(record.read_bytes(), RECORD).get(WRITTEN)
        )
    except (OSError, CorruptCheckpointError):
        return {}
    if not isinstance(listed, dict):
        return {}
    return {name: entry for name, entry in listed.items() if isinstance(entry, dict)}


def is_unchanged(path: Path, known: JsonObject) -> bool:
    """Return whether a file is the listed one, as it was written.

    Args:
        path: of the file.
        known: its entry in a record's list of files; empty for a file that is not listed.
    """
    status = path.stat()
    if known.get("bytes") != status.st_size:
        return False
    if "sha256" in known:
        return hash_file(path) == known
    return bool(known.get("changed_ns") == status.st_ctime_ns)


def some(names: Sequence[str]) -> str:
    """Return the first names of a list and the number of the others, for a message."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
