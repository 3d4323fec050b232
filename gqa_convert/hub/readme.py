"""OUT/README.md: who wrote it, what its front matter states, and how a card replaces it."""

import hashlib
import json
from pathlib import Path

from gqa_convert.checkpoint.atomic_files import write_whole
from gqa_convert.checkpoint.signed_card import CARD, MARKER
from gqa_convert.checkpoint.strict_json import JsonObject
from gqa_convert.errors import OutputError, PublishError
from gqa_convert.hub.converted import Converted
from gqa_convert.hub.licenses import Words
from gqa_convert.hub.markup import one_line

_INHERITED = ("license", "license_name", "license_link", "language")
"""Keys of the source's front matter that hold for the result too."""


def read_readme(folder: Path) -> str | None:
    """The text of OUT/README.md, None if there is none.

    Raises:
        PublishError: the file is no text.
    """
    path = folder / CARD
    if not path.is_symlink() and not path.exists():
        return None
    try:
        return path.read_bytes().decode("utf-8")
    except (OSError, ValueError) as problem:
        raise PublishError(f"{path} can't be read as text ({problem}): move it away") from None


def came_with_source(model: Converted, text: str) -> bool:
    """Whether a README is the source's, which convert copied."""
    written = model.record.written.get(CARD)
    return written is not None and written.sha256 == hashlib.sha256(text.encode()).hexdigest()


def stated_by_source(model: Converted, text: str | None) -> Words:
    """Licence and languages that the source states, in its README or in the comment of the card that replaced
    it.
    """
    from huggingface_hub import ModelCard
    from yaml import YAMLError

    found: JsonObject = {}
    try:
        if text and (match := MARKER.search(text)):
            found = json.loads(match[1])
        elif text and came_with_source(model, text):
            found = ModelCard(text, ignore_metadata_errors=True).data.to_dict()
    except (YAMLError, ValueError):
        return {}
    stated: dict[str, str | list[str]] = {}
    for key in _INHERITED:
        value = found.get(key)
        if value and isinstance(value, str):
            stated[key] = one_line(value.strip())
        elif value and isinstance(value, list):
            stated[key] = [one_line(word) for word in value if isinstance(word, str)]
    return stated


def write_card(model: Converted, card: str) -> Path:
    """Write the card in one step.

    Raises:
        OutputError: the card can't be written.
    """
    path = model.folder / CARD
    text = read_readme(model.folder)
    if text == card and not path.is_symlink():
        return path
    try:
        write_whole(path, card.encode())
    except OSError as problem:
        raise OutputError(f"{path} can't be written ({problem.strerror}): make room, or the folder writable") from None
    return path
