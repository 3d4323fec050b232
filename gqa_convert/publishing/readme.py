"""OUT/README.md: who wrote it, what its front matter states, and how a card replaces it."""

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import yaml

from gqa_convert.checkpoint.atomic_files import atomic_file
from gqa_convert.checkpoint.ownership import set_aside
from gqa_convert.checkpoint.signed_card import MARKER, is_our_card, signed
from gqa_convert.errors import OutputError, PublishError
from gqa_convert.publishing.facts import README, Facts

_FRONT = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|\Z)", re.DOTALL)
_LARGEST = 4 << 20
"""Maximum bytes of a README."""
_INHERITED = ("license", "license_name", "license_link", "language", "pipeline_tag")
"""Keys of the source's front matter that hold for the result too."""


def read_readme(folder: Path) -> str | None:
    """The text of OUT/README.md, None if there is none.

    Raises:
        PublishError: the file is not a text file.
    """
    path = folder / README
    if not path.is_symlink() and not path.exists():
        return None
    try:
        if path.stat().st_size > _LARGEST:
            raise PublishError(f"{path} has more than {_LARGEST >> 20} MiB, too large for a model card: move it away")
        return path.read_bytes().decode("utf-8")
    except (OSError, ValueError) as problem:
        raise PublishError(f"{path} can't be read as text ({problem}): move it away") from None


def check_replaceable(facts: Facts, text: str | None, *, overwrite: bool) -> None:
    """Refuse to replace a README that a user wrote for this folder. A README that came with the source, or an unedited
    card of `publish`, may be replaced.

    Raises:
        PublishError: a user wrote or edited the README.
    """
    if text is None or overwrite or is_our_card(text):
        return
    if not _came_with_source(facts, text):
        kind = (
            "a card that was edited since publish wrote it"
            if MARKER.search(text)
            else "neither the source's README nor a card of publish"
        )
        raise PublishError(f"{facts.folder / README} is {kind}: move it away, or rename it with --overwrite-card")


def sign(front: str, body: str, stated: dict[str, Any]) -> str:
    """A card with a signature in a comment between front matter and body. The comment also keeps what the source
    states, since the card replaces the only file that did.
    """
    return signed(front, json.dumps(stated).replace("<", r"\u003c").replace(">", r"\u003e"), body)


def stated_by_source(facts: Facts, text: str | None) -> dict[str, Any]:
    """Licence, languages and task that the source states, from its README or from the card that replaced it."""
    if text is None:
        return {}
    match = MARKER.search(text)
    try:
        if match:
            found = json.loads(match[1])
        else:
            front = _FRONT.match(text) if _came_with_source(facts, text) else None
            found = yaml.safe_load(front[1]) if front else None
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    words = {key: _words(found.get(key)) for key in _INHERITED} if isinstance(found, dict) else {}
    return {key: value for key, value in words.items() if value}


def _words(value: object) -> str | list[str]:
    if isinstance(value, list):
        return [word for each in value if isinstance(word := _words(each), str) and word]
    return (
        "no" if value is False else value.strip() if isinstance(value, str) else ""
    )  # YAML takes Norwegian, `no`, for False


def _came_with_source(facts: Facts, text: str) -> bool:
    return hashlib.sha256(text.encode()).hexdigest() in facts.source_digest(README)


def write_card(facts: Facts, card: str) -> Path:
    """Write the card in one step; a README that a user wrote for this folder is renamed first.

    Raises:
        OutputError: the card can't be written.
    """
    folder = facts.folder
    path = folder / README
    try:
        if not path.is_symlink() and path.is_file() and path.read_bytes() == card.encode():
            return path
        with atomic_file(path) as file:
            file.write(card.encode())
            file.flush()
            os.fsync(file.fileno())  # a full disk must not leave the folder without either README
            text = read_readme(folder)
            if text is not None and not is_our_card(text) and not _came_with_source(facts, text):
                set_aside(path)
    except OSError as problem:
        raise OutputError(
            f"{path} can't be written ({problem.strerror or problem}): make the folder writable"
        ) from None
    return path
