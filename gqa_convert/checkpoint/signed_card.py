"""The signature in a model card, which shows whether the card was edited after `publish` wrote it."""

import hashlib
import re

CARD = "README.md"
MARKER = re.compile(
    r"^<!-- written by gqa-convert publish from a source that states (\{.*\}), sha256 ([0-9a-f]{64}) -->\n",
    re.MULTILINE,
)


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
    return f"{front}<!-- written by gqa-convert publish from a source that states {stated}, sha256 {digest} -->\n{body}"
