"""A text as input of a causal model: tokens, the bytes that each token covers, and windows."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gqa_convert.data.documents import Piece
from gqa_convert.errors import DataError
from gqa_convert.text.scoring.material import Batch, Integers, Material
from gqa_convert.text.scoring.windows import Window, cut_windows, longest_first

BLOCK = 2048
"""The bytes in a block of text, the unit over which standard errors are computed."""


def encode(tokenizer: Any, text: str, *, special: bool = False, target: bool = False) -> tuple[Integers, Integers]:
    """A text's tokens, and the character position at which each of them ends.

    If a tokenizer gives no offsets, its tokens are assumed to be equally long.

    Args:
        tokenizer: a transformers tokenizer.
        text: the text to encode.
        special: add the tokenizer's special tokens.
        target: encode it as a target of an encoder-decoder, which may have another language.

    Returns:
        [n] and [n]; the last end is the length of the text.
    """
    fast = bool(tokenizer.is_fast)
    found = tokenizer(
        **{"text_target" if target else "text": text},
        add_special_tokens=special,
        return_attention_mask=False,
        return_offsets_mapping=fast,
        verbose=False,
    )
    ids = np.array(found["input_ids"], np.int64)
    if fast:
        ends = (
            np.maximum.accumulate(np.array([end for _, end in found["offset_mapping"]], np.int64)) if len(ids) else ids
        )
    else:
        ends = len(text) * np.arange(1, len(ids) + 1) // max(1, len(ids))
    ends[-1:] = len(text)
    return ids, ends


def byte_ends(text: str, ends: Integers) -> Integers:
    """Convert character positions to UTF-8 byte positions."""
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    widths = 1 + (points >= 1 << 7).astype(np.int64) + (points >= 1 << 11) + (points >= 1 << 16)
    return np.concatenate([[0], np.cumsum(widths)])[ends]


def prefix_of(tokenizer: Any) -> list[int]:
    """The prefix of every document, from which its first token is predicted: the beginning-of-text token, if there is
    one.
    """
    return [] if tokenizer.bos_token_id is None else [int(tokenizer.bos_token_id)]


def text_material(
    pieces: Sequence[Piece],
    tokenizer: Any,
    *,
    context: int,
    stride: int,
    batch: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Material:
    """The tokens and windows of a text for a causal model. End-of-text tokens are not scored, because they cover no
    bytes of the text.

    Args:
        pieces: documents or parts of them, in order.
        tokenizer: the model's.
        context: see `cut_windows`.
        stride: see `cut_windows`.
        batch: windows per forward pass.
        progress: called with the pieces tokenised, and their number.

    Raises:
        DataError: the text has no token to predict.
    """
    prefix = prefix_of(tokenizer)
    ids, sizes, blocks, documents = [], [], [], []
    begin = place = first_block = document_bytes = 0
    begins = True
    for number, piece in enumerate(pieces):
        if begins:
            begin, document_bytes = place, 0
            ids.append(np.array(prefix, np.int64))
            sizes.append(np.zeros(len(prefix), np.int64))
            blocks.append(np.full(len(prefix), first_block))
            place += len(prefix)
        tokens, ends = encode(tokenizer, piece.text)
        ends = byte_ends(piece.text, ends)
        ids.append(tokens)
        sizes.append(np.diff(ends, prepend=0))
        blocks.append(first_block + np.maximum(document_bytes + ends - 1, 0) // BLOCK)
        place += len(tokens)
        document_bytes += len(piece.text.encode())
        begins = piece.last
        if piece.last or number == len(pieces) - 1:
            documents.append((begin, place))
            first_block += -(-document_bytes // BLOCK)
        progress(number + 1, len(pieces))
    flat = np.concatenate([np.empty(0, np.int64), *ids])
    scored = np.ones(len(flat), np.bool_)
    scored[[start for start, end in documents if end > start]] = False
    if not scored.any():
        raise DataError(
            f"the text has {len(flat)} tokens, and none of them has a preceding token to be predicted from: name more text"
        )
    windows = cut_windows(documents, context, stride)
    digest = hashlib.sha256(flat.tobytes() + np.array(documents, np.int64).tobytes()).hexdigest()
    return Material(
        flat,
        scored,
        np.concatenate(sizes),
        np.concatenate(blocks),
        first_block,
        WindowBatches(flat, windows, batch),
        digest,
    )


class WindowBatches:
    """Windows of a text in batches, padded on the right. Later tokens can't change a causal model's predictions, so no
    mask is needed and all models run as they do without padding.

    Args:
        ids: [n], the text.
        windows: the windows of the text.
        batch: windows per forward pass.
    """

    def __init__(self, ids: Integers, windows: Sequence[Window], batch: int) -> None:
        self._ids, self._windows = ids, windows
        self._batches = longest_first([window.length for window in windows], batch)

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, number: int) -> Batch:
        chosen = [self._windows[each] for each in self._batches[number]]
        longest = chosen[0].length
        inputs = np.zeros((len(chosen), longest), np.int64)
        rows, places = [], []
        for row, (start, length, skip) in enumerate(chosen):
            inputs[row, :length] = self._ids[start : start + length]
            rows.append(np.arange(row * longest + skip, row * longest + length))
            places.append(np.arange(start + skip + 1, start + length + 1))
        there = np.concatenate(places)
        return Batch({"input_ids": inputs}, np.concatenate(rows), self._ids[there], there)
