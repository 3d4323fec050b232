"""The signature of a model card by which one that nobody has edited is known again."""

import hashlib
import re

CARD = "README.md"
MARKER = re.compile(
    r"^<!-- written by gqa-convert publish from a source that states (\{.*\}), sha256 ([0-9a-f]{64}) -->\n",
    re.MULTILINE,
)


def is_our_card(text: str) -> bool:
    """Whether a text is a card as `publish` wrote it."""
    match = MARKER.search(text)
    return match is not None and signed(text[: match.start()], match[1], text[match.end() :]) == text


def signed(front: str, stated: str, body: str) -> str:
    """A card with its signature between front matter and body.

    Args:
        front: the front matter.
        stated: what the source's front matter states, as JSON on one line.
        body: the rest.
    """
    digest = hashlib.sha256(f"{front}{stated}{body}".encode()).hexdigest()
    return f"{front}<!-- written by gqa-convert publish from a source that states {stated}, sha256 {digest} -->\n{body}"
