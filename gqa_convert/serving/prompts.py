"""The prompts for the clients, from a few tokens to some hundred, where a wrong rotary base shows, and the positions of
the logits to compare.
"""

from pathlib import Path

from gqa_convert.checkpoint.strict_json import Config
from gqa_convert.errors import ConfigError
from gqa_convert.families.context_length import stated_positions
from gqa_convert.text.stdlib_text import read_texts, source_files

from .client import NEW_TOKENS

_LENGTHS = (5, 48, 320)
_PLACES = 16
"""Number of positions of each prompt whose logits are compared, besides those that decide the new tokens."""
_TEXT = 3000
"""Number of characters of the text, enough for the longest prompt with any tokenizer."""


def make_text() -> str:
    """Text to tokenise, with non-ASCII characters and consecutive blanks."""
    return "naïve façade § 12,345.67 €\n\n    " + read_texts(source_files(held_out=True))[0][:_TEXT]


def make_prompts(config: Config, ids: list[int] | None) -> list[list[int]]:
    """Prompts of increasing length that leave room for the new tokens.

    Args:
        config: content of config.json.
        ids: of a text, None for random prompts.

    Raises:
        ConfigError: the context leaves no room for a prompt.
    """
    import numpy as np

    context = stated_positions(config)
    room = max(_LENGTHS) if context is None else context - NEW_TOKENS
    if room < 1:
        raise ConfigError(
            f"a context of {context} tokens leaves no room for a prompt and {NEW_TOKENS} new tokens: it can't be checked"
        )
    if ids is None or len(ids) < max(_LENGTHS):
        # the first ids are often special tokens
        ids = (
            np.random.default_rng(0)
            .integers(min(8, config["vocab_size"] - 1), config["vocab_size"], max(_LENGTHS))
            .tolist()
        )
    return [ids[:length] for length in sorted({min(length, room) for length in _LENGTHS})]


def places(prompt: int) -> list[int]:
    """Positions to compare in a sequence of a prompt of this length and all new tokens but the last."""
    spread = {index * (prompt - 1) // _PLACES for index in range(_PLACES)} - {prompt - 1}
    return [*sorted(spread), *range(prompt - 1, prompt - 1 + NEW_TOKENS)]


def has_tokenizer(folder: Path) -> bool:
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "vocab.txt")
    return any((folder / name).is_file() for name in names)
