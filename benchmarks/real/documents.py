"""Documents of the real text: the mixed calibration text, and blocks of held-out tokens."""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from .folders import text_file
from .text import write

MIXED = "mixed"
"""The kind of calibration text that alternates between prose and code."""
PIECE_CHARACTERS = 12_000
DOCUMENT_TOKENS = 2048
"""The tokens that a document contributes to held-out blocks, unless a block is longer."""


def read_documents(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)["text"]


def pieces(texts: Iterable[str], characters: int) -> Iterator[str]:
    """The texts cut into pieces of at most so many characters."""
    for text in texts:
        yield from (text[first : first + characters] for first in range(0, len(text), characters))


def calibration_file(folder: Path, kind: str) -> Path:
    """The calibration text of a kind; the mixed one is written when it is first needed."""
    path = text_file(folder, kind, "calibration")
    if kind == MIXED:
        each = [
            pieces(read_documents(text_file(folder, one, "calibration")), PIECE_CHARACTERS) for one in ("prose", "code")
        ]
        write(path, chain.from_iterable(zip(*each, strict=False)))
    return path


def cut_blocks(documents: Iterable[Sequence[int]], window: int, tokens: int, end: int) -> list[list[int]]:
    """Blocks of `window` consecutive tokens, without overlap.

    Documents are concatenated, each closed by an end-of-text token. Where a block is longer than `DOCUMENT_TOKENS`, each
    block is the beginning of one document that is long enough, so that far positions have something to look back to.

    Args:
        documents: token ids.
        window: tokens of a block.
        tokens: tokens of all blocks together, rounded down to whole blocks.
        end: the end-of-text token.

    Returns:
        At most `tokens // window` blocks; fewer if the documents have fewer tokens.
    """
    wanted = tokens // window
    if window > DOCUMENT_TOKENS:
        long_ones = (list(document[:window]) for document in documents if len(document) >= window)
        return [block for block, _ in zip(long_ones, range(wanted), strict=False)]
    stream: list[int] = []
    for document in documents:
        if len(stream) >= wanted * window:
            break
        stream += [*document, end][:DOCUMENT_TOKENS]
    count = min(wanted, len(stream) // window)
    return [stream[number * window : (number + 1) * window] for number in range(count)]


def held_out_blocks(folder: Path, kind: str, tokenizer: Any, window: int, tokens: int) -> torch.Tensor:
    """Blocks [b, window] of a kind's held-out text; b is 0 where no document is long enough."""
    texts = read_documents(text_file(folder, kind, "held-out"))
    encoded = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
    found = cut_blocks(encoded, window, tokens, tokenizer.eos_token_id)
    return torch.tensor(found, dtype=torch.long).reshape(-1, window)
