"""Cuts token files into blocks of equal length, with a new order and a new offset in each epoch.

The tokens are treated as circular, so that an offset loses none of them. The first epoch of a stream, whose end is not
known yet, is permuted within windows of consecutive blocks instead. `datasets` shuffles streams with a buffer, whose
content its state does not hold, so that a resumed run would lose samples; a place in a window is computed from the
number of the sample alone.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from gqa_convert.errors import DataError
from gqa_convert.text.labels import IGNORED
from gqa_convert.text.marked_tokens import ends_document, ids_of, is_learned
from gqa_convert.text.order import Integers, mix, permuted
from gqa_convert.text.token_files import TokenSource

SHUFFLE_WINDOW: Final = 1 << 22
"""The default window of a stream, in tokens: thousands of documents, which are tokenised in seconds."""


class Cut(NamedTuple):
    """The location of a block.

    Attributes:
        start: the position of its first token.
        fresh: how many of its tokens are in no earlier block of the epoch.
        size: the number of tokens in the source; None while the source grows and the block is not at its end.
    """

    start: int
    fresh: int
    size: int | None


def block_count(size: int, length: int) -> int:
    """The number of blocks in an epoch; the last one may overlap the first."""
    return -(-size // length)


def window_samples(window: int, raw: int, kinds: int = 1) -> int:
    """The number of samples in a window of a stream: at least one run, and as many as fit.

    Args:
        window: in tokens.
        raw: the tokens of a run of `kinds` samples.
        kinds: the samples of a run.
    """
    return max(1, window // raw) * kinds


def shuffled(number: int, window: int, count: int | None, key: int) -> int:
    """The place of a sample in the first epoch of a stream, whose samples are permuted within windows.

    Args:
        number: the number of the sample.
        window: the samples of a window, all of which are available.
        count: the samples of the epoch, where they are known; the last window may be shorter.
        key: selects the order.
    """
    first = number - number % window
    size = window if count is None else min(window, count - first)
    return first + permuted(number - first, size, mix(key, first, 4))


def cut(tokens: TokenSource, number: int, length: int, key: int, *, window: int | None) -> Cut:
    """The location of block `number` of a source, counted over all epochs.

    Args:
        tokens: the source's tokens.
        number: the number of the block.
        length: the tokens per block.
        key: selects the source's orders and offsets.
        window: of a source that is still being written: the tokens of a window in its first epoch; otherwise None.
    """
    blocks_in_window = 1 if window is None else window_samples(window, length)
    end = (number // blocks_in_window + 1) * blocks_in_window
    size, complete = tokens.size(None if window is None else end * length + 1)
    if not complete:
        return Cut(shuffled(number, blocks_in_window, None, key) * length, length, None)
    blocks = block_count(size, length)
    epoch, place = divmod(number, blocks)
    if window is not None and epoch == 0:
        place = shuffled(place, blocks_in_window, blocks, key)
        return Cut(place * length, min(length, size - place * length), size)
    offset = mix(key, epoch, 1) % size
    place = permuted(place, blocks, mix(key, epoch, 2))
    return Cut((offset + place * length) % size, min(length, size - place * length), size)


class Sampler(Protocol):
    """Makes samples of one objective from tokens.

    Attributes:
        shortest: the fewest tokens that a source must have.
    """

    shortest: int

    @property
    def raw_tokens(self) -> int | Fraction:
        """The mean number of text tokens in a sample."""

    @property
    def longest(self) -> tuple[int, int] | None:
        """The tokens of the longest encoder input and target, if the data and not the objective determine them; else
        None.
        """

    @property
    def notes(self) -> Sequence[str]:
        """Messages about the data for the user."""

    def cut(self, tokens: TokenSource, number: int, key: int, *, window: int | None) -> Any:
        """The location of a sample in a source, as `cut` returns it."""

    def batch(self, places: Sequence[tuple[TokenSource, Any]], keys: Sequence[tuple[int, int]]) -> dict[str, Integers]:
        """The samples at these locations; the keys seed the random draws."""

    def count(self, size: int) -> int:
        """The number of samples in an epoch of a source of this size."""

    def first(self, tokens: TokenSource, limit: int) -> list[Any]:
        """The locations of consecutive samples within the first `limit` tokens of a source."""


class CausalSampler:
    """Blocks for a causal language model.

    Args:
        length: tokens per sample.
        eos: closes each document.
        document_mask: number the documents, for attention within each.
    """

    longest: None = None
    notes = ()

    def __init__(self, length: int, eos: int, *, document_mask: bool) -> None:
        self.raw_tokens, self.shortest = length, length + 1
        self._eos, self._document_mask = eos, document_mask

    def cut(self, tokens: TokenSource, number: int, key: int, *, window: int | None) -> Cut:
        """See `cut`."""
        return cut(tokens, number, self.raw_tokens, key, window=window)

    def batch(self, places: Sequence[tuple[TokenSource, Cut]], keys: Sequence[tuple[int, int]]) -> dict[str, Integers]:  # noqa: ARG002
        """See `causal_batch`."""
        rows = np.empty((len(places), self.raw_tokens + 1), np.int64)
        for row, (tokens, place) in zip(rows, places, strict=True):
            row[:] = tokens.read(place.start, len(row))
        return causal_batch(rows, [place for _, place in places], self._eos, document_mask=self._document_mask)

    def count(self, size: int) -> int:
        """The number of blocks in an epoch."""
        return block_count(size, self.raw_tokens)

    def first(self, tokens: TokenSource, limit: int) -> list[Cut]:
        """Blocks that predict each of the first tokens once, except the very first; the last block may be shorter."""
        length = self.raw_tokens
        size, _ = tokens.size(limit + length + 1)
        scored = min(limit, size) - 1
        return [Cut(start, min(length, scored - start), None) for start in range(0, scored, length)]


def causal_batch(rows: Integers, cuts: Sequence[Cut], eos: int, *, document_mask: bool) -> dict[str, Integers]:
    """Samples for a causal language model.

    Args:
        rows: [b, L + 1], the blocks' tokens with their marks, and the token after each.
        cuts: the locations of the blocks.
        eos: closes each document.
        document_mask: number the documents, for attention within each.

    Returns:
        `input_ids` and `labels` (the next tokens; IGNORED where there is nothing to predict or learn), and with `document_mask`
        also `position_ids` and `document_ids`, which count from 0 in each block: [b, L].
    """
    ids, labels = ids_of(rows[:, :-1]), np.where(is_learned(rows[:, 1:]), ids_of(rows[:, 1:]), IGNORED)
    length = ids.shape[1]
    for row, (start, fresh, size) in zip(labels, cuts, strict=True):
        row[fresh:] = IGNORED
        if (
            size is not None and start <= size - 1 < start + length
        ):  # the token after the last is the first, which is not predicted
            row[size - 1 - start] = IGNORED
    batch = {"input_ids": ids, "labels": labels}
    if document_mask:
        ends = ends_document(rows[:, :-1], eos)
        labels[ends] = IGNORED
        documents = np.zeros_like(ids)
        np.cumsum(ends[:, :-1], axis=1, out=documents[:, 1:])
        places = np.broadcast_to(np.arange(length), ids.shape)
        begins = np.zeros_like(ids)
        begins[:, 1:] = np.where(ends[:, :-1], places[:, 1:], 0)
        batch |= {"position_ids": places - np.maximum.accumulate(begins, axis=1), "document_ids": documents}
    return batch


def check_size(tokens: TokenSource, needed: int, label: str) -> None:
    """Refuse a source that is shorter than one sample.

    Raises:
        DataError: the source has too few tokens.
    """
    size, _ = tokens.size(needed)
    if size < needed:
        raise DataError(
            f"{label} has {size} tokens, fewer than one sample of {needed}: add text, or make sequence_length smaller"
        )
