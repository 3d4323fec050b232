"""OUT/README.md: whose it is, what its front matter states, and how a card takes its place."""

import hashlib
import re
import secrets
from pathlib import Path
from typing import Any

import yaml

from gqa_convert.checkpoint.publication import sync
from gqa_convert.errors import OutputError, PublishError
from gqa_convert.publishing.facts import README, Facts

_MARKER = re.compile(r"^<!-- written by gqa-convert publish, sha256 ([0-9a-f]{64}) -->\n", re.MULTILINE)
_FRONT = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|\Z)", re.DOTALL)
_LARGEST = 4 << 20
"""Bytes of a README whose front matter is read."""


def read_readme(folder: Path) -> str | None:
    """The text of OUT/README.md, None if there is none.

    Raises:
        PublishError: it is no text file.
    """
    path = folder / README
    if not path.is_symlink() and not path.exists():
        return None
    try:
        if path.stat().st_size > _LARGEST:
            raise PublishError(f"{path} has more than {_LARGEST >> 20} MiB, far too many for a model card: move it away")
        return path.read_bytes().decode("utf-8")
    except (OSError, ValueError) as problem:
        raise PublishError(f"{path} can't be read as text ({problem}): move it away") from None


def check_replaceable(facts: Facts, text: str | None, *, overwrite: bool) -> None:
    """Refuse to replace a README that somebody wrote for this folder.

    It may be replaced if it came with the source, or is a card of `publish` that nobody has changed since.

    Raises:
        PublishError: it is somebody's own.
    """
    if text is None or overwrite or is_our_card(text):
        return
    if hashlib.sha256(text.encode()).hexdigest() not in facts.source_digest(README):
        kind = "a card that was edited since publish wrote it" if _MARKER.search(text) else "neither the source's nor a card of publish"
        raise PublishError(f"{facts.folder / README} is {kind}: move it away, or replace it with --overwrite-card")


def is_our_card(text: str) -> bool:
    """Whether a text is a card as it was written."""
    match = _MARKER.search(text)
    return match is not None and sign(text[: match.start()], text[match.end() :]) == text


def sign(front: str, body: str) -> str:
    """A card that says of itself, in a comment between front matter and body, what it was when it was written."""
    digest = hashlib.sha256(f"{front}{body}".encode()).hexdigest()
    return f"{front}<!-- written by gqa-convert publish, sha256 {digest} -->\n{body}"


def front_matter(text: str | None) -> dict[str, Any]:
    """The YAML between the first two lines of dashes; nothing if there is none that can be read."""
    match = _FRONT.match(text or "")
    try:
        found = yaml.safe_load(match[1]) if match else None
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return {key: value for key, value in found.items() if isinstance(key, str)} if isinstance(found, dict) else {}


def write_card(folder: Path, card: str) -> Path:
    """Put the card in its place, whole or not at all.

    Raises:
        OutputError: it can't be written.
    """
    path = folder / README
    temporary = folder / f".{README}-{secrets.token_hex(4)}"
    try:
        if not path.is_symlink() and path.is_file() and path.read_bytes() == card.encode():
            return path
        temporary.write_bytes(card.encode())
        sync(temporary)
        temporary.replace(path)
        sync(folder)
    except OSError as problem:
        raise OutputError(f"{path} can't be written ({problem.strerror or problem}): make the folder writable") from None
    finally:
        temporary.unlink(missing_ok=True)
    return path
