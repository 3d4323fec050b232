"""Cuts tokens into blocks of equal length, with a new order and a new offset in each epoch.

The tokens are treated as circular, so that an offset loses none of them. The first epoch of a stream, whose end is not
known yet, is permuted within windows of consecutive blocks instead. `datasets` shuffles streams with a buffer, whose
content its state does not hold, so that a resumed run would lose samples; a place in a window is computed from the
number of the sample alone.

Shape legend: b blocks, L tokens of a block.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Final, NamedTuple

import numpy as np

from gqa_convert.data.labels import IGNORED
from gqa_convert.data.order import Integers, mix, permuted
from gqa_convert.data.token_files import LAST, UNLEARNED, TokenSource, ids_of

SHUFFLE_WINDOW: Final = 1 << 22
"""The default window of a stream, in tokens: thousands of documents, which are tokenised in seconds."""

Keys = Sequence[tuple[int, int]]
"""What seeds the random numbers of each sample."""


class Block(NamedTuple):
    """The location of a block.

    Attributes:
        start: the position of its first token.
        before: the tokens of its epoch in earlier blocks.
    """

    start: int
    before: int


class Sampler(ABC):
    """Makes samples of one objective from tokens.

    Attributes:
        raw_tokens: the mean number of text tokens in a sample.
        shortest: the fewest tokens that a source must have.
        longest: the tokens of the longest encoder input and target, if the data and not the objective determine them;
            else None.
        notes: messages about the data for the user.
    """

    raw_tokens: int | Fraction
    shortest: int
    longest: tuple[int, int] | None = None
    notes: Sequence[str] = ()

    def measure(self, sources: Sequence[tuple[TokenSource, int]]) -> None:  # noqa: B027
        """Set what depends on the data, from the tokens of each source and the source's share of the samples."""

    @abstractmethod
    def count(self, tokens: TokenSource) -> int:
        """The number of samples in an epoch of a source."""

    @abstractmethod
    def tokens_for(self, samples: int, window: int) -> int | None:
        """How many tokens of a stream its first samples are cut from; None for all of them."""

    @abstractmethod
    def cut(self, tokens: TokenSource, number: int, key: int, window: int) -> Any:
        """The location of a sample in a source.

        Args:
            tokens: the source's tokens.
            number: the number of the sample, counted over all epochs.
            key: selects the source's orders and offsets.
            window: the tokens of a window, in which the first epoch of a stream is shuffled.

        Raises:
            IndexError: the stream is not tokenised so far.
        """

    @abstractmethod
    def first(self, tokens: TokenSource, limit: int) -> list[Any]:
        """The locations of consecutive samples within the first `limit` tokens of a source."""

    @abstractmethod
    def batch(self, places: Sequence[tuple[TokenSource, Any]], keys: Keys) -> dict[str, Integers]:
        """The samples at these locations."""


class BlockSampler(Sampler):
    """Blocks of equal length.

    Args:
        length: the tokens of text in a block.
        following: the tokens behind a block that it needs, too.
    """

    def __init__(self, length: int, following: int) -> None:
        self.raw_tokens = self.length = length
        self.shortest = length + following

    def count(self, tokens: TokenSource) -> int:
        """The number of blocks in an epoch; the last one may overlap the first."""
        return -(-tokens.size // self.length)

    def tokens_for(self, samples: int, window: int) -> int:
        """The tokens of whole windows."""
        blocks = self._in_window(window)
        return -(-samples // blocks) * blocks * self.length + self.shortest - self.length

    def _in_window(self, window: int) -> int:
        """The blocks of a window."""
        return max(1, window // self.length)

    def cut(self, tokens: TokenSource, number: int, key: int, window: int) -> Block:
        """See `Sampler.cut`."""
        if not tokens.complete and self.tokens_for(number + 1, window) > tokens.size:
            raise IndexError(f"sample {number} of {tokens.label} is cut from tokens that are not there yet")
        blocks = self.count(tokens)
        epoch, place = divmod(number, blocks)
        if tokens.is_stream and epoch == 0:
            size = self._in_window(window)
            first = place - place % size
            place = first + permuted(place - first, min(size, blocks - first), mix(key, first, 4))
            return Block(place * self.length, place * self.length)
        before = permuted(place, blocks, mix(key, epoch, 2)) * self.length
        return Block((mix(key, epoch, 1) + before) % tokens.size, before)


class CausalSampler(BlockSampler):
    """Blocks for a causal language model.

    Args:
        length: tokens per sample.
        document_mask: number the documents, for attention within each.
    """

    def __init__(self, length: int, *, document_mask: bool) -> None:
        super().__init__(length, following=1)
        self._document_mask = document_mask

    def batch(self, places: Sequence[tuple[TokenSource, Block]], keys: Keys) -> dict[str, Integers]:  # noqa: ARG002
        """Blocks of text.

        Returns:
            `input_ids` and `labels` (the next tokens; IGNORED where there is nothing to predict or learn), and with
            `document_mask` also `position_ids`, which begin anew with each document: [b, L].
        """
        length = self.length
        rows = np.stack([tokens.marked(place.start, length + 1) for tokens, place in places])
        ids = ids_of(rows)
        labels = np.where(rows[:, 1:] & UNLEARNED, IGNORED, ids[:, 1:])
        for row, (tokens, place) in zip(labels, places, strict=True):
            row[tokens.size - place.before :] = IGNORED  # they are in an earlier block of the epoch, too
            if place.start <= tokens.size - 1 < place.start + length:  # the first token does not follow the last
                row[tokens.size - 1 - place.start] = IGNORED
        batch = {"input_ids": ids[:, :-1], "labels": labels}
        if self._document_mask:
            ends = (rows[:, :-1] & LAST) != 0
            labels[ends] = IGNORED
            batch["position_ids"] = _positions(ends)
        return batch

    def first(self, tokens: TokenSource, limit: int) -> list[Block]:
        """Blocks that predict each of the first tokens once, except the very first; the last block may be shorter."""
        scored = min(limit, tokens.size) - 1
        return [Block(start, start + tokens.size - scored) for start in range(0, scored, self.length)]


def _positions(ends: Any) -> Integers:
    """The number of each token in its document: [b, L].

    Args:
        ends: [b, L], whether a token is the last of its document.
    """
    places = np.broadcast_to(np.arange(ends.shape[1]), ends.shape)
    begins = np.zeros(ends.shape, np.int64)
    begins[:, 1:] = np.where(ends[:, :-1], places[:, 1:], 0)
    return places - np.maximum.accumulate(begins, axis=1)
