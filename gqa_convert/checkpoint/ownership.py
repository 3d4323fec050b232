"""Decide which files this program wrote and may replace; all other files belong to the user and are never deleted or
overwritten.

The record in every result lists the files that were written with it, with their SHA-256. Weights that a method streams
from disk to disk are not hashed, because that would take longer than the conversion. For them, the record has the time
of the last change of the file's inode, which the system sets and nobody can set back: a file that was copied or moved
here, or written to, has another one. A file that is not proven to be the listed one belongs to the user.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint.signed_card import ASIDE, CARD, is_our_card
from gqa_convert.checkpoint.strict_json import parse_object
from gqa_convert.errors import CorruptCheckpointError

RECORD = "gqa_conversion.json"
"""The file in every converted checkpoint that records how it was made."""

WRITTEN = "written"
"""The record's list of files: `{name: {"bytes": ..., "sha256": ...}}`, see `list_written`."""

_NAMED = 3
"""Number of files that a message names; it counts the rest."""

Entries = Mapping[str, Any]


def list_written(folder: Path, result: Mapping[str, Any] | None = None) -> dict[str, dict[str, Any]]:
    """Return the record's list of files in a new result: the size and SHA-256 of each, or for weights whose hash is not
    known the size and the time of the last change.

    Args:
        folder: the complete result without the record, which is written last. Its weights are closed and do not change
            any more.
        result: `{"files": {name: {"bytes": ..., "sha256": ...}}}` of the weight files, if their hashes are known.
    """
    listed: dict[str, dict[str, Any]] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name, status = path.relative_to(folder).as_posix(), path.stat()
        known = (result or {"files": {}})["files"].get(name)
        if known is not None:
            listed[name] = dict(known)
        elif path.suffix == ".safetensors":
            listed[name] = {"bytes": status.st_size, "changed_ns": status.st_ctime_ns}
        else:
            listed[name] = {"bytes": status.st_size, "sha256": _sha256(path)}
    return listed


def foreign_files(folder: Path) -> list[str]:
    """Return the files in a folder that this program did not write, as relative paths.

    A subfolder that holds only such files is one entry that ends in `/`.
    """
    record = RECORD if (folder / RECORD).is_file() and not (folder / RECORD).is_symlink() else None
    ours = _entries(folder, record) if record else {}
    if record is None or not ours:
        return sorted(
            f"{path.name}/" if path.is_dir() and not path.is_symlink() else path.name for path in folder.iterdir()
        )
    return list(
        _foreign(folder, "", record, ours, {parent.as_posix() for name in ours for parent in Path(name).parents})
    )


def _foreign(folder: Path, inside: str, record: str, ours: Entries, parents: set[str]) -> Iterator[str]:
    for path in sorted((folder / inside).iterdir()):
        name = f"{inside}{path.name}"
        if path.is_symlink():
            yield name
        elif path.is_dir():
            if name in parents:
                yield from _foreign(folder, f"{name}/", record, ours, parents)
            else:
                yield f"{name}/"
        elif name != record and not (name in ours and _is_unchanged(path, ours[name])) and not _is_card(path, name):
            yield name


def _is_unchanged(path: Path, known: Mapping[str, Any]) -> bool:
    """Return whether a file is the listed one, as it was written."""
    status = path.stat()
    if known.get("bytes") != status.st_size:
        return False
    if "sha256" in known:
        return bool(known["sha256"] == _sha256(path))
    return known.get("changed_ns") == status.st_ctime_ns


def _is_card(path: Path, name: str) -> bool:
    """Return whether a file is a model card of `publish`, which is written after the record."""
    try:
        return name == CARD and is_our_card(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def _entries(folder: Path, name: str) -> dict[str, dict[str, Any]]:
    """Return the files of a result by name, or an empty dict if the record is unreadable."""
    listed = _read(folder / name).get(WRITTEN)
    return (
        {name: entry for name, entry in listed.items() if isinstance(entry, dict)} if isinstance(listed, dict) else {}
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        return parse_object(path.read_bytes(), str(path))
    except (OSError, CorruptCheckpointError):
        return {}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def some(names: Sequence[str]) -> str:
    """Return the first names of a list and the number of the others, for a message."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def set_aside(path: Path) -> Path:
    """Rename a user's file so that its name becomes free, and return the new path; see `signed_card.is_set_aside`.

    Raises:
        OSError: the file cannot be renamed.
    """
    number = 0
    while True:
        aside = path.with_name(f"{path.name}{ASIDE}{number or ''}")
        if not aside.exists() and not aside.is_symlink():
            path.rename(aside)
            return aside
        number += 1
