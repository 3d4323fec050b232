"""What every objective implements, blocks of equal length, and the first objective, next tokens.

Blocks are cut in a new order and at a new offset in each epoch. The tokens are treated as circular,
so that an offset loses none of them. The first epoch of a stream, whose end is not known yet, is
permuted within windows of consecutive blocks instead. `datasets` shuffles streams with a buffer,
whose content its state does not hold, so that a resumed run would lose samples; a place in a window
is computed from the number of the sample alone.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from .encoders import Encoder, text_encoder
from .order import mix, permuted
from .sources import Source, SourceKind, TextSource
from .token_files import TokenSource

SHUFFLE_WINDOW = 1 << 22
"""The tokens of a stream over which the samples of its first epoch are shuffled: thousands of
documents, which are tokenised in seconds.
"""

IGNORED = -100
"""The label of positions that the loss ignores, as in PyTorch and transformers."""

Batch = dict[str, npt.NDArray[Any]]
"""The inputs of a model and its labels, by name: [b, ...]."""
Keys = Sequence[tuple[int, int]]
"""What seeds the random numbers of each sample."""
Places = Sequence[tuple[TokenSource, Any]]
"""The source of each sample, and its location there."""
Shares = Sequence[tuple[TokenSource, int]]
"""The tokens of each source, and its share of the samples."""


ModelKind = Literal["a decoder-only model", "an encoder-decoder"]


class SampleSettings(NamedTuple):
    """What determines the samples of a model, beside the data and the seed.

    Attributes:
        tokenizer: a transformers tokenizer.
        objective: one of `OBJECTIVES`.
        length: `sequence_length`, in tokens.
        decoder_start: the first token of the decoder's input; None for a model without an encoder.
        starts_with_last: whether the decoder's input starts with the target's last token instead.
        documents_apart: whether positions start anew with each document of a block, so that no
            document attends to another one.
    """

    tokenizer: Any
    objective: str
    length: int
    decoder_start: int | None = None
    starts_with_last: bool = False
    documents_apart: bool = False

    def __str__(self) -> str:
        """What tells the samples from others, without the tokenizer, which the tokens depend on."""
        _, *others = self
        return " ".join(map(str, others))


class Sampler(ABC):
    """Makes the samples of one objective.

    Args:
        settings: of the samples.

    Attributes:
        models: the kind of models that the objective trains.
        reads: the kinds of sources that it reads.
        raw_tokens: the number of text tokens in a sample, or the most if samples differ.
        shortest: the fewest tokens that a source must have.

    Raises:
        DataError: the settings, the tokenizer or the checkpoint do not suit the objective.
    """

    models: ModelKind
    reads: tuple[SourceKind, ...]
    raw_tokens: int
    shortest: int = 1

    def __init__(self, settings: SampleSettings) -> None:
        self.settings = settings

    @abstractmethod
    def encoder(self, source: Source, text: TextSource) -> Encoder:
        """What turns the documents of a source into tokens.

        Raises:
            DataError: the source does not suit the objective, or the tokenizer not the source.
        """

    def mean_tokens(self, sources: Shares) -> int | Fraction:  # noqa: ARG002
        """The mean number of text tokens in a sample of sources with these shares."""
        return self.raw_tokens

    @abstractmethod
    def tokens_for(self, samples: int) -> int | None:
        """How many tokens of a stream its first samples are cut from; None for all of them."""

    @abstractmethod
    def cut(self, tokens: TokenSource, number: int, key: int) -> Any:
        """The location of a sample in a source.

        Args:
            tokens: the source's tokens.
            number: the number of the sample, counted over all epochs.
            key: selects the source's orders and offsets.

        Raises:
            IndexError: the stream is not tokenised so far.
        """

    @abstractmethod
    def first(self, tokens: TokenSource, limit: int) -> list[Any]:
        """The locations of consecutive samples within the first `limit` tokens of a source."""

    @abstractmethod
    def batch(self, places: Places, keys: Keys) -> Batch:
        """The samples at these locations: what the model's forward pass takes, and `labels`, which
        are what it is to predict at each position, or IGNORED.
        """


class Block(NamedTuple):
    """The location of a block.

    Attributes:
        start: the position of its first token.
        before: the tokens of its epoch in earlier blocks.
    """

    start: int
    before: int


class BlockSampler(Sampler):
    """Blocks of equal length.

    Args:
        settings: of the samples.
        length: the tokens of text in a block.
        following: the tokens behind a block that it needs, too.
    """

    def __init__(self, settings: SampleSettings, length: int, following: int) -> None:
        super().__init__(settings)
        self.raw_tokens = self.length = length
        self.shortest = length + following
        self.window_blocks = max(1, SHUFFLE_WINDOW // length)

    def count(self, tokens: TokenSource) -> int:
        """The number of blocks in an epoch; the last one may overlap the first."""
        return -(-tokens.size // self.length)

    def tokens_for(self, samples: int) -> int:
        """The tokens of whole windows."""
        windows = -(-samples // self.window_blocks)
        return windows * self.window_blocks * self.length + self.shortest - self.length

    def cut(self, tokens: TokenSource, number: int, key: int) -> Block:
        """See `Sampler.cut`."""
        if not tokens.complete and self.tokens_for(number + 1) > tokens.size:
            raise IndexError(
                f"sample {number} of {tokens.label} is cut from tokens that are not there yet"
            )
        blocks = self.count(tokens)
        epoch, place = divmod(number, blocks)
        if tokens.is_stream and epoch == 0:
            first = place - place % self.window_blocks
            size = min(self.window_blocks, blocks - first)
            before = (first + permuted(place - first, size, mix(key, first, 4))) * self.length
            return Block(before, before)
        before = permuted(place, blocks, mix(key, epoch, 2)) * self.length
        return Block((mix(key, epoch, 1) + before) % tokens.size, before)


class CausalSampler(BlockSampler):
    """Blocks for a causal language model. `sequence_length` is the tokens of a block."""

    models = "a decoder-only model"
    reads = ("text", "chat")

    def __init__(self, settings: SampleSettings) -> None:
        super().__init__(settings, settings.length, following=1)

    def encoder(self, source: Source, text: TextSource) -> Encoder:
        """Running text between special tokens, or conversations; of a stream if it is stated, so
        that a run which goes on need not ask the Hub.
        """
        chats = source.format == "chat" or not text.is_stream
        return text_encoder(source, text, self.settings.tokenizer, closed=True, chats=chats)

    def batch(self, places: Places, keys: Keys) -> Batch:  # noqa: ARG002
        """Blocks of text.

        Returns:
            `input_ids`, `labels` (the next tokens; IGNORED where there is nothing to predict), and
            `position_ids` where documents are kept apart: [b, L].
        """
        length = self.length
        ids = np.stack([tokens.read(place.start, length + 1) for tokens, place in places])
        labels = ids[:, 1:].copy()
        for row, (tokens, place) in zip(labels, places, strict=True):
            # tokens that are in an earlier block of the epoch, too
            row[tokens.size - place.before :] = IGNORED
            # the first token, which does not follow the last
            end = tokens.size - 1 - place.start
            if 0 <= end < length:
                row[end] = IGNORED
        batch = {"input_ids": ids[:, :-1], "labels": labels}
        if self.settings.documents_apart:
            batch["position_ids"] = np.stack(
                [tokens.positions(place.start, length) for tokens, place in places]
            )
        return batch

    def first(self, tokens: TokenSource, limit: int) -> list[Block]:
        """Blocks that predict each of the first tokens once, except the very first; the last block
        may be shorter.
        """
        scored = min(limit, tokens.size) - 1
        before = tokens.size - scored
        return [Block(start, start + before) for start in range(0, scored, self.length)]
