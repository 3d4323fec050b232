"""Pairs of texts for encoder-decoders: whole documents of different lengths.

Shape legend: b pairs, Le tokens of the longest source, Ld tokens of the longest target.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from gqa_convert.data.documents import Fields, Piece
from gqa_convert.data.encoders import tokenizer_state
from gqa_convert.data.labels import IGNORED
from gqa_convert.data.objectives import SampleSettings
from gqa_convert.data.order import Integers, mix, permuted
from gqa_convert.data.sampler import Batch, Keys, Places, Sampler, Shares
from gqa_convert.data.sources import Source, TextSource
from gqa_convert.data.token_files import Encoder, Marked, TokenSource, ids_of, packed
from gqa_convert.errors import DataError


def refuse_languages(tokenizer: Any) -> None:
    """Refuse a tokenizer that marks the languages of texts, which the fields of pairs do not state.

    Raises:
        DataError: it does.
    """
    if hasattr(tokenizer, "src_lang") and hasattr(tokenizer, "tgt_lang"):
        raise DataError(
            "the tokenizer marks the language of every text (as those of mBART, PLBART, M2M100 and NLLB do), which pairs do not state: "
            "train and evaluate this model with transformers"
        )


class PairEncoder:
    """Encodes pairs, each as two documents with the tokenizer's special tokens. A target ends with end-of-text even if
    the tokenizer does not add it, because a decoder must learn to stop. Pairs without text on either side are left out.

    Attributes:
        fields: the fields of both texts.
        key: everything that determines the tokens, as plain data.
    """

    def __init__(self, tokenizer: Any, fields: Fields) -> None:
        self._tokenizer = tokenizer
        self.fields = fields
        eos = tokenizer.eos_token_id
        self._end = [] if eos is None else [eos]
        self.key = ["pairs", tokenizer_state(tokenizer), self._end]

    def encode(self, pieces: Sequence[Piece]) -> Marked:
        """The tokens of source, target, source, target and so on, one behind the other: [tokens]."""
        pairs = [piece.text for piece in pieces if all(piece.text)]
        parts: list[list[int]] = []
        if pairs:
            sources, targets = map(list, zip(*pairs, strict=True))
            options = {
                "split_special_tokens": True,
                "return_attention_mask": False,
                "verbose": False,
            }
            found = self._tokenizer(text=sources, text_target=targets, **options)
            for source, target in zip(found["input_ids"], found["labels"], strict=True):
                closed = target if target[-1:] == self._end else target + self._end
                if source and closed:
                    parts += [source, closed]
        return packed(parts, [True] * len(parts))


def padded(rows: Sequence[Integers], value: int) -> Integers:
    """Rows of different lengths as one array, filled on the right: [b, longest]."""
    whole = np.full((len(rows), max(map(len, rows))), value, np.int64)
    for row, tokens in zip(whole, rows, strict=True):
        row[: len(tokens)] = tokens
    return whole


def shortened(text: npt.NDArray[Any], longest: int) -> npt.NDArray[Any]:
    """A text truncated to `longest` tokens, the last of which remains its last one, end-of-text: [at most `longest`]."""
    return text if len(text) <= longest else np.concatenate([text[: longest - 1], text[-1:]])


class PairSampler(Sampler):
    """Pairs of texts in a new order each epoch: what the encoder reads, and what the decoder learns to write.
    `sequence_length` is the most tokens of either text; longer ones are truncated.

    Attributes:
        raw_tokens: the mean number of tokens in a pair, over the sources by their shares; before `measure`, the most.
    """

    def __init__(self, settings: SampleSettings) -> None:
        super().__init__(settings)
        refuse_languages(settings.tokenizer)
        self.raw_tokens = Fraction(2 * settings.length)
        self._start = settings.decoder_start or 0
        pad = settings.tokenizer.pad_token_id
        self._pad = self._start if pad is None else int(pad)

    def encoder(self, source: Source, text: TextSource) -> Encoder:  # noqa: ARG002
        """See `PairEncoder`."""
        names = (
            source.source_field or "",
            source.target_field or "",
        )  # a recipe without them is refused
        return PairEncoder(self.settings.tokenizer, Fields(names, "pair"))

    def measure(self, sources: Shares) -> None:
        """See `Sampler.measure`."""
        shares = sum(share for _, share in sources)
        self.raw_tokens = Fraction(0)
        for tokens, share in sources:
            lengths = np.minimum(_lengths(tokens), self.settings.length)
            self.raw_tokens += Fraction(share * int(lengths.sum()), shares * len(lengths))

    def tokens_for(self, samples: int) -> None:  # noqa: ARG002
        """Pairs are few compared with running text, and are read completely."""
        return

    def count(self, tokens: TokenSource) -> int:
        """The number of pairs in a source."""
        return len(tokens.ends) // 2

    def cut(self, tokens: TokenSource, number: int, key: int) -> int:
        """The number of a pair within its source; see `Sampler.cut`."""
        count = self.count(tokens)
        epoch, place = divmod(number, count)
        return permuted(place, count, mix(key, epoch, 2))

    def first(self, tokens: TokenSource, limit: int) -> list[int]:
        """The first pairs whose tokens add up to the limit, and at least one."""
        sums = np.cumsum(np.minimum(_lengths(tokens), self.settings.length).sum(axis=1))
        return list(range(max(1, int(np.searchsorted(sums, limit, side="right")))))

    def batch(self, places: Places, keys: Keys) -> Batch:  # noqa: ARG002
        """A batch of pairs.

        Returns:
            `input_ids` [b, Le]; `labels` [b, Ld], IGNORED behind the end of a target; `decoder_input_ids` [b, Ld], the
            targets shifted right by one; and `attention_mask` [b, Le] if the sources differ in length.
        """
        sources = [self._text(tokens, 2 * number) for tokens, number in places]
        targets = [self._text(tokens, 2 * number + 1) for tokens, number in places]
        shifted = [np.roll(target, 1) for target in targets]
        for row in [] if self.settings.starts_with_last else shifted:
            row[0] = self._start
        batch = {
            "input_ids": padded(sources, self._pad),
            "labels": padded(targets, IGNORED),
            "decoder_input_ids": padded(shifted, self._pad),
        }
        mask = padded([np.ones_like(source) for source in sources], 0)
        return batch if mask.all() else batch | {"attention_mask": mask}

    def _text(self, tokens: TokenSource, number: int) -> Integers:
        """The tokens of a text, truncated; sources have even numbers, targets odd ones."""
        start = int(tokens.ends[number - 1]) if number else 0
        return ids_of(
            shortened(tokens.tokens[start : int(tokens.ends[number])], self.settings.length)
        )


def _lengths(tokens: TokenSource) -> Integers:
    """The tokens of both texts of each pair, special ones included: [pairs, 2]."""
    return np.diff(tokens.ends, prepend=0).reshape(-1, 2)
