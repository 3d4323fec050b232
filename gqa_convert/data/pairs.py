"""Pairs of texts for encoder-decoders: whole documents of different lengths.

Shape legend: b pairs, Le tokens of the longest source, Ld tokens of the longest target.
"""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from .encoders import Encoder, PairEncoder
from .files import Fields
from .model_tokenizer import refuse_languages
from .order import Integers, mix, permuted
from .sampler import IGNORED, Batch, Keys, Places, Sampler, SampleSettings, Shares
from .sources import Source, TextSource
from .token_files import TokenSource


def padded(rows: Sequence[Integers], value: int) -> Integers:
    """Rows of different lengths as one array, filled on the right: [b, longest]."""
    whole = np.full((len(rows), max(map(len, rows))), value, np.int64)
    for row, tokens in zip(whole, rows, strict=True):
        row[: len(tokens)] = tokens
    return whole


def shortened(text: Integers, longest: int) -> Integers:
    """A text truncated to `longest` tokens: [at most `longest`].

    Its last token remains the last one, which is end-of-text.
    """
    return text if len(text) <= longest else np.concatenate([text[: longest - 1], text[-1:]])


class PairSampler(Sampler):
    """Pairs of texts in a new order each epoch: what the encoder reads, and what the decoder learns
    to write. `sequence_length` is the most tokens of either text; longer ones are truncated.
    """

    models = "an encoder-decoder"
    reads = ("pairs",)

    def __init__(self, settings: SampleSettings) -> None:
        super().__init__(settings)
        refuse_languages(settings.tokenizer)
        self.raw_tokens = 2 * settings.length
        self._start = settings.decoder_start or 0
        pad = settings.tokenizer.pad_token_id
        self._pad = self._start if pad is None else int(pad)

    def encoder(self, source: Source, text: TextSource) -> Encoder:  # noqa: ARG002
        """See `PairEncoder`."""
        # a recipe without them is refused
        names = (source.source_field or "", source.target_field or "")
        return PairEncoder(self.settings.tokenizer, Fields(names, "pair"))

    def mean_tokens(self, sources: Shares) -> Fraction:
        """See `Sampler.mean_tokens`."""
        mean = Fraction(0)
        for tokens, share in sources:
            lengths = np.minimum(_lengths(tokens), self.settings.length)
            mean += Fraction(share * int(lengths.sum()), len(lengths))
        return mean / sum(share for _, share in sources)

    def tokens_for(self, samples: int) -> None:  # noqa: ARG002
        """Pairs are few compared with running text, and are read completely."""
        return

    def cut(self, tokens: TokenSource, number: int, key: int) -> int:
        """The number of a pair within its source; see `Sampler.cut`."""
        count = len(tokens.ends) // 2
        epoch, place = divmod(number, count)
        return permuted(place, count, mix(key, epoch, 2))

    def first(self, tokens: TokenSource, limit: int) -> list[int]:
        """The first pairs whose tokens add up to the limit, and at least one."""
        sums = np.cumsum(np.minimum(_lengths(tokens), self.settings.length).sum(axis=1))
        return list(range(max(1, int(np.searchsorted(sums, limit, side="right")))))

    def batch(self, places: Places, keys: Keys) -> Batch:  # noqa: ARG002
        """A batch of pairs.

        Returns:
            `input_ids` [b, Le]; `labels` [b, Ld], IGNORED behind the end of a target;
            `decoder_input_ids` [b, Ld], the targets shifted right by one; and `attention_mask` [b,
            Le] if the sources differ in length.
        """
        # sources have even numbers, targets odd ones
        longest = self.settings.length
        sources, targets, shifted = [], [], []
        for tokens, number in places:
            sources.append(shortened(tokens.document(2 * number), longest))
            targets.append(shortened(tokens.document(2 * number + 1), longest))
            shifted.append(np.roll(targets[-1], 1))
            if not self.settings.starts_with_last:
                shifted[-1][0] = self._start
        batch = {
            "input_ids": padded(sources, self._pad),
            "labels": padded(targets, IGNORED),
            "decoder_input_ids": padded(shifted, self._pad),
        }
        mask = padded([np.ones_like(source) for source in sources], 0)
        return batch if mask.all() else batch | {"attention_mask": mask}


def _lengths(tokens: TokenSource) -> Integers:
    """The tokens of both texts of each pair, special ones included: [pairs, 2]."""
    return np.diff(tokens.ends, prepend=0).reshape(-1, 2)
