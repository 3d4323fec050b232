"""Samples of text infilling, as BART was trained (Lewis et al. 2020, section 2.2).

30% of a block's tokens are taken out, in spans whose lengths are drawn from Poisson(3). Each span is replaced by a
single mask token, and a span of length 0 puts one between two tokens. The decoder writes the whole block.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from gqa_convert.errors import DataError
from gqa_convert.text.collating import DecoderInput, collated
from gqa_convert.text.framing import Frame
from gqa_convert.text.order import Integers
from gqa_convert.text.packing import Cut, block_count, cut
from gqa_convert.text.token_files import TokenSource

Keys = npt.NDArray[np.uint64]
SHARE = Fraction(3, 10)
MEAN_LENGTH = 3.0
_BITS = 53
_LONGEST = 40
"""Longer spans have a probability below 2^-53."""
_CUMULATIVE = np.array(
    [
        round(share * 2**_BITS)
        for share in accumulate(
            math.exp(-MEAN_LENGTH) * MEAN_LENGTH**length / math.factorial(length) for length in range(_LONGEST)
        )
    ],
    np.uint64,
)
"""Of Poisson(3), as whole numbers: the same on every machine and in every version of NumPy."""


def noise_tokens(raw: int) -> int:
    """How many tokens of a block are taken out."""
    return max(1, round(raw * SHARE))


def keys_needed(raw: int) -> int:
    """Random numbers that the corruption of a block takes."""
    return raw + 1 + 2 * noise_tokens(raw)


def span_lengths(noise: int, most: int, keys: Keys) -> Integers:
    """Lengths of spans that sum to `noise`, in the order in which they were drawn; the last one is cut to fit.

    Args:
        noise: their sum.
        most: how many there may be; spans of length 0 are left out where there would be more.
        keys: random numbers; where they do not suffice, the last span takes the rest.
    """
    drawn = np.searchsorted(_CUMULATIVE, keys >> np.uint64(64 - _BITS), side="right")
    sums = np.cumsum(drawn)
    count = min(int(np.searchsorted(sums, noise)) + 1, len(drawn))
    lengths = drawn[:count].astype(np.int64)
    lengths[-1] += noise - sums[count - 1]
    return lengths if count <= most else lengths[lengths > 0]


def infilled(raw: Integers, keys: Keys, mask: int) -> Integers:
    """A block with its spans replaced; between two masks at least one token is left, so that no two spans are one.

    Args:
        raw: [n] tokens.
        keys: [keys_needed(n)] random numbers.
        mask: the token that stands for a span.

    Returns:
        The tokens that the encoder reads: n minus those taken out, plus one for each span.
    """
    noise = noise_tokens(len(raw))
    places = len(raw) - noise + 1  # before, between and behind the tokens that stay
    lengths = span_lengths(noise, places, keys[places:])
    gaps = np.argsort(keys[:places], kind="stable")[: len(lengths)]
    order = np.argsort(gaps)
    gaps, lengths = gaps[order], lengths[order]
    starts = gaps + np.cumsum(lengths) - lengths
    edges = np.zeros(len(raw) + 1, np.int64)
    np.add.at(edges, starts, 1)
    np.add.at(edges, starts + lengths, -1)
    return np.insert(raw[np.cumsum(edges)[:-1] == 0], gaps, mask)


def mask_token(tokenizer: Any) -> int:
    """The token that stands for what was taken out.

    Raises:
        DataError: the tokenizer has none.
    """
    if tokenizer.mask_token_id is None:
        raise DataError("the tokenizer has no mask token, which text_infilling needs: use the objective pairs")
    return int(tokenizer.mask_token_id)


class FramedTokens:
    """A source's tokens, and what stands around a block of them in its language.

    Args:
        tokens: without special tokens.
        frames: of what the encoder reads, and of what the decoder writes.
    """

    def __init__(self, tokens: TokenSource, frames: tuple[Frame, Frame]) -> None:
        self._tokens, self.frames = tokens, frames
        self.grows = tokens.grows
        self.fingerprint = f"{tokens.fingerprint} {[list(frame) for frame in frames]}"

    def size(self, wanted: int | None = None) -> tuple[int, bool]:
        """As `TokenSource.size`."""
        return self._tokens.size(wanted)

    def read(self, start: int, count: int) -> npt.NDArray[Any]:
        """As `TokenSource.read`."""
        return self._tokens.read(start, count)

    def close(self) -> None:
        """As `TokenSource.close`."""
        self._tokens.close()


class InfillingSampler:
    """Blocks of `FramedTokens` with spans replaced by masks.

    Args:
        length: of the decoder's text, special tokens included; the encoder's is shorter.
        frame: how many special tokens stand around a text, at most.
        mask: the token that stands for a span.
        decoder: how the decoder's input is made.

    Raises:
        DataError: fewer than two tokens of text fit.
    """

    longest: None = None
    notes = ()

    def __init__(self, length: int, frame: int, mask: int, decoder: DecoderInput) -> None:
        self.raw_tokens = self.shortest = length - frame
        self._mask, self._decoder = mask, decoder
        if self.raw_tokens < 2:
            raise DataError(
                f"sequence_length is {length}, and the tokenizer puts {frame} tokens around each text: make it larger"
            )

    def cut(self, tokens: TokenSource, number: int, key: int, *, grows: bool) -> Cut:
        """As `packing.cut`."""
        return cut(tokens, number, self.raw_tokens, key, grows=grows)

    def count(self, size: int) -> int:
        """Blocks in an epoch."""
        return block_count(size, self.raw_tokens)

    def first(self, tokens: TokenSource, limit: int) -> list[Cut]:
        """Whole blocks that lie within the first tokens."""
        size, _ = tokens.size(limit)
        return [
            Cut(start, self.raw_tokens, None)
            for start in range(0, min(limit, size) - self.raw_tokens + 1, self.raw_tokens)
        ]

    def batch(self, places: Sequence[tuple[Any, Cut]], keys: Sequence[tuple[int, int]]) -> dict[str, Integers]:
        """Corrupted blocks and what they were, as `collated` says."""
        sources, targets = [], []
        for (tokens, place), key in zip(places, keys, strict=True):
            raw = tokens.read(place.start, self.raw_tokens).astype(np.int64)
            drawn = np.random.Philox(key=np.array(key, np.uint64)).random_raw(keys_needed(len(raw)))
            source, target = tokens.frames
            sources.append(
                np.concatenate([source.before, infilled(raw, drawn, self._mask), source.after]).astype(np.int64)
            )
            targets.append(np.concatenate([target.before, raw, target.after]).astype(np.int64))
        return collated(sources, targets, self._decoder)
