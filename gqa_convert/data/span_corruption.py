"""T5's span corruption: spans of a text are removed, each is replaced by a sentinel, and the
decoder predicts each span after its sentinel (Raffel et al. 2020, section 3.1.4).

15% of the tokens are removed, in spans of three on average. The length of a block is chosen so that
the encoder's input has exactly `sequence_length` tokens, end-of-text included, and neither side is
ever padded.

Shape legend: b blocks, n tokens of a block, s removed spans.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gqa_convert.errors import DataError

from .encoders import Encoder, text_encoder
from .model_tokenizer import end_of_text, sentinel_ids
from .order import Integers
from .sampler import Batch, Block, BlockSampler, Keys, Places, SampleSettings
from .sources import Source, TextSource
from .token_files import TokenSource

Flags = npt.NDArray[np.bool_]
_DENSITY = 0.15
_MEAN_LENGTH = 3.0
_SHORTEST_INPUT = 3
"""A token, a sentinel, and end-of-text."""


class Shape(NamedTuple):
    """The sizes of a corrupted block.

    Attributes:
        raw: the tokens of text.
        noise: the tokens removed from the text.
        spans: the number of spans removed.
    """

    raw: int
    noise: int
    spans: int


def shape_of(raw: int) -> Shape:
    """The shape of a block of `raw` tokens of text, at least 2."""
    noise = min(max(round(raw * _DENSITY), 1), raw - 1)
    spans = min(max(round(noise / _MEAN_LENGTH), 1), raw - noise)
    return Shape(raw, noise, spans)


def shape_for(length: int) -> Shape:
    """The shape of the longest block whose encoder input has `length` tokens.

    Raises:
        DataError: no block has so short an input.
    """
    if length < _SHORTEST_INPUT:
        raise DataError(
            f"sequence_length is {length}, and span corruption needs {_SHORTEST_INPUT}: "
            "make it larger"
        )
    shapes = map(shape_of, range(2 * length, 1, -1))
    # the input is the rest of the text, a sentinel for each span, and end-of-text
    return next(shape for shape in shapes if shape.raw - shape.noise + shape.spans + 1 == length)


class SpanCorruption:
    """Corrupts blocks of text.

    Args:
        tokenizer: a tokenizer with sentinels and an end-of-text token.
        decoder_start: the first token of the decoder's input.
        length: the tokens of the encoder's input.

    Attributes:
        raw: the tokens of text that come to this length.

    Raises:
        DataError: the tokenizer lacks a token or has too few sentinels for so long an input, or no
            block has so short a one.
    """

    def __init__(self, tokenizer: Any, decoder_start: int, length: int) -> None:
        self._start = decoder_start
        self._eos = end_of_text(tokenizer)
        self.sentinels = sentinel_ids(tokenizer)
        if not len(self.sentinels):
            raise DataError(
                "the tokenizer has no sentinel tokens <extra_id_0>, <extra_id_1>, ...: "
                "use the objective pairs"
            )
        self.raw, _, spans = shape_for(length)
        if spans > len(self.sentinels):
            raise DataError(
                f"an encoder input of {length} tokens needs {spans} sentinel tokens, "
                f"the tokenizer has {len(self.sentinels)}: make sequence_length smaller"
            )

    def batch(self, raw: Integers, keys: Keys) -> Batch:
        """Corrupted blocks.

        Args:
            raw: [b, n] tokens of text.
            keys: [b], which seed the choice of spans.

        Returns:
            `input_ids` [b, n - noise + s + 1], `labels` [b, noise + s + 1], and
            `decoder_input_ids`, the labels shifted right by one.
        """
        total, noise, spans = shape_of(raw.shape[1])
        kept = total - noise
        generators = [np.random.Philox(key=np.array(key, np.uint64)) for key in keys]
        drawn = np.stack([generator.random_raw(total - 2) for generator in generators])

        # Divide the text, all divisions into spans being equally likely.
        texts = segmented(kept, spans, drawn[:, : kept - 1])
        removals = segmented(noise, spans, drawn[:, kept - 1 :])
        lengths = np.stack([texts, removals], axis=2)
        alternating = np.broadcast_to([False, True], lengths.shape)
        removed = np.repeat(alternating, lengths.ravel()).reshape(raw.shape)

        # Replace the spans by sentinels in the input, and the rest in the labels.
        labels = self._marked(raw, ~removed)
        decoder = np.roll(labels, 1, axis=1)
        decoder[:, 0] = self._start
        inputs = self._marked(raw, removed)
        return {"input_ids": inputs, "labels": labels, "decoder_input_ids": decoder}

    def _marked(self, raw: Integers, dropped: Flags) -> Integers:
        """Rows in which each run of dropped tokens is replaced by its sentinel, with end-of-text
        behind them.

        Text and spans alternate, beginning with text, so that the run number i of either has the
        sentinel i.
        """
        begins = dropped.copy()
        begins[:, 1:] &= ~dropped[:, :-1]
        sentinels = self.sentinels[np.cumsum(begins, axis=1) - 1]
        rows = np.where(begins, sentinels, raw)[begins | ~dropped].reshape(len(raw), -1)
        return np.pad(rows, ((0, 0), (0, 1)), constant_values=self._eos)


def segmented(total: int, parts: int, keys: npt.NDArray[np.uint64]) -> Integers:
    """Rows of positive lengths that sum to `total`, drawn uniformly from all such rows.

    Args:
        total: the sum of each row.
        parts: lengths per row.
        keys: [b, total - 1] random numbers.

    Returns:
        [b, parts].
    """
    cuts = np.full((len(keys), parts + 1), total, np.int64)
    cuts[:, 0] = 0
    if parts > 1:
        smallest = np.argpartition(keys, parts - 2, axis=1)[:, : parts - 1]
        cuts[:, 1:-1] = np.sort(smallest, axis=1) + 1
    return np.diff(cuts, axis=1)


class SpanSampler(BlockSampler):
    """Corrupted blocks of token files, cut one behind the other. The tokens left over in an epoch
    are fewer than a block. `sequence_length` is the tokens of the encoder's input.
    """

    models = "an encoder-decoder"
    reads = ("text",)

    def __init__(self, settings: SampleSettings) -> None:
        self._corruption = SpanCorruption(
            settings.tokenizer, settings.decoder_start or 0, settings.length
        )
        super().__init__(settings, self._corruption.raw, following=0)

    def encoder(self, source: Source, text: TextSource) -> Encoder:
        """Running text without special tokens."""
        return text_encoder(source, text, self.settings.tokenizer, closed=False, chats=False)

    def count(self, tokens: TokenSource) -> int:
        """The number of samples in an epoch."""
        return tokens.size // self.length

    def first(self, tokens: TokenSource, limit: int) -> list[Block]:
        """The whole blocks within the first `limit` tokens."""
        starts = range(0, min(limit, tokens.size) - self.length + 1, self.length)
        return [Block(start, start) for start in starts]

    def batch(self, places: Places, keys: Keys) -> Batch:
        """See `SpanCorruption.batch`."""
        blocks = [tokens.read(place.start, self.length) for tokens, place in places]
        return self._corruption.batch(np.stack(blocks), keys)
