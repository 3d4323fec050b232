"""OUT/README.md: who wrote it, what its front matter states, and how a card replaces it."""

import hashlib
import json
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint.atomic_files import write_whole
from gqa_convert.checkpoint.signed_card import CARD, MARKER
from gqa_convert.errors import OutputError, PublishError
from gqa_convert.hub.converted import Converted
from gqa_convert.hub.licenses import Words
from gqa_convert.hub.markup import printable

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
    return written is not None and written["sha256"] == hashlib.sha256(text.encode()).hexdigest()


def stated_by_source(model: Converted, text: str) -> Words:
    """Licence and languages that the source states, in its README or in the comment of the card that replaced
    it; nothing if there is neither.
    """
    match = MARKER.search(text)
    found = json.loads(match[1]) if match else _front_matter(text)
    stated: dict[str, str | list[str]] = {}
    for key in _INHERITED if isinstance(found, dict) else ():
        value = found.get(key)
        if value and isinstance(value, str):
            stated[key] = printable(model.names.name(value.strip()))
        elif value and isinstance(value, list):
            stated[key] = [printable(word) for word in value if isinstance(word, str)]
    return stated


def _front_matter(text: str) -> Any:
    """The front matter of a README, in which every value is a word: `no` is Norwegian, not false. None if it can't be
    read.
    """
    import yaml
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    try:
        block = REGEX_YAML_BLOCK.search(text)
        return block and yaml.load(block[2], yaml.BaseLoader)
    except yaml.YAMLError:
        return None


def write_card(path: Path, card: str) -> None:
    """Write the card in one step.

    Raises:
        OutputError: the card can't be written.
    """
    try:
        write_whole(path, card.encode())
    except OSError as problem:
        raise OutputError(f"{path} can't be written ({problem.strerror}): make room, or the folder writable") from None
