"""Decide which files this program wrote and may replace; all other files belong to the user and are
never deleted or overwritten.

The record in every result lists the files that were written with it, with their SHA-256. Weights
that a method streams from disk to disk are not hashed, because that would take longer than the
conversion. For them, the record has the time of the last change of the file's inode, which the
system sets and nobody can set back: a file that was copied or moved here, or written to, has
another one. A file that is not proven to be the listed one belongs to the user.

`publish` writes a model card later; a signature in it shows whether it was edited since.
"""

import hashlib
import os
import re
from pathlib import Path

from gqa_convert.checkpoint.files import raise_error
from gqa_convert.checkpoint.provenance import PROVENANCE
from gqa_convert.errors import CorruptCheckpointError
from gqa_convert.runtime.json_objects import JsonObject, parse_object

WRITTEN = "written"
"""The record's list of files: `{name: {"bytes": ..., "sha256": ...}}`, see `list_written`."""

CARD = "README.md"
MARKER = re.compile(
    r"^<!-- written by gqa-convert publish from a source that states (\{.*\}), "
    r"sha256 ([0-9a-f]{64}) -->\n",
    re.MULTILINE,
)


def list_written(folder: Path, *, hash_weights: bool) -> dict[str, JsonObject]:
    """Return the record's list of files in a new result: the size and SHA-256 of each, or for
    weights that are not hashed the size and the time of the last change.

    Args:
        folder: the complete result without the record, which is written last. Its weights are
            closed and do not change any more.
        hash_weights: whether weights are hashed, which may take longer than the conversion.
    """
    listed = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if hash_weights or path.suffix != ".safetensors":
            listed[name] = hash_file(path)
        else:
            status = path.stat()
            listed[name] = {"bytes": status.st_size, "changed_ns": status.st_ctime_ns}
    return listed


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
    for root, folders, names in os.walk(folder, onerror=raise_error):
        links = [name for name in folders if Path(root, name).is_symlink()]
        for path in sorted(Path(root, name) for name in links + names):
            name = path.relative_to(folder).as_posix()
            is_ours = False
            if ours and path.is_file() and not path.is_symlink():
                # `publish` writes a model card after the record
                is_card = name == CARD and is_our_card(path.read_text("utf-8", "surrogateescape"))
                is_ours = is_card or name == PROVENANCE or is_unchanged(path, ours.get(name, {}))
            if not is_ours:
                found.append(name)
    return found


def _read_listed(folder: Path) -> JsonObject:
    """Return the files that the record of a result lists, by name; none if there is no readable
    record.
    """
    record = folder / PROVENANCE
    try:
        listed = (
            None
            if record.is_symlink()
            else parse_object(record.read_bytes(), PROVENANCE).get(WRITTEN)
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


def is_our_card(text: str) -> bool:
    """Return whether a text is a card exactly as `publish` wrote it."""
    match = MARKER.search(text)
    return (
        match is not None and signed(text[: match.start()], match[1], text[match.end() :]) == text
    )


def signed(front: str, stated: str, body: str) -> str:
    """Return a card with its signature between front matter and body.

    Args:
        front: the front matter.
        stated: what the source's front matter states, as JSON on one line.
        body: the text below the front matter.
    """
    digest = hashlib.sha256(f"{front}{stated}{body}".encode("utf-8", "surrogateescape")).hexdigest()
    return (
        f"{front}<!-- written by gqa-convert publish from a source that states {stated}, "
        f"sha256 {digest} -->\n{body}"
    )
