"""Pairs of texts for encoder-decoders: their tokens, their samples, and batches of texts of different lengths.

Shape legend: b rows, Le tokens of the longest encoder input, Ld tokens of the longest target.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gqa_convert.data.documents import PairFields, Piece
from gqa_convert.data.labels import IGNORED
from gqa_convert.data.order import Integers, mix, permuted
from gqa_convert.data.packing import Keys, Sampler
from gqa_convert.data.token_files import Marked, TokenSource, packed
from gqa_convert.data.tokenizing import tokenizer_state
from gqa_convert.errors import DataError


class Frame(NamedTuple):
    """The special tokens around a text."""

    before: list[int]
    after: list[int]


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


def frames_of(tokenizer: Any) -> tuple[Frame, Frame]:
    """The special tokens around sources and around targets.

    A target ends with end-of-text even if the tokenizer does not add it, because a decoder must learn to stop.

    Raises:
        DataError: the tokenizer marks the languages of texts.
    """
    refuse_languages(tokenizer)
    source, target = frame_around(tokenizer, "text"), frame_around(tokenizer, "text_target")
    eos = tokenizer.eos_token_id
    if eos is not None and eos not in target.after:
        target = Frame(target.before, [*target.after, int(eos)])
    return source, target


def frame_around(tokenizer: Any, argument: str) -> Frame:
    """The special tokens that a tokenizer puts around a text.

    Args:
        tokenizer: a transformers tokenizer.
        argument: `text` for sources, `text_target` for targets.

    Raises:
        DataError: the tokens of the text itself change when special tokens are added.
    """
    whole, bare = (
        list(tokenizer(**{argument: "a"}, add_special_tokens=special, verbose=False)["input_ids"])
        for special in (True, False)
    )
    for start in range(len(whole) - len(bare) + 1):
        if bare and whole[start : start + len(bare)] == bare:
            return Frame(whole[:start], whole[start + len(bare) :])
    raise DataError(
        "the tokenizer changes a text's tokens when it adds special tokens: use the tokenizer that belongs to the model"
    )


class PairEncoder:
    """Encodes pairs, each as two documents with their special tokens. Pairs without text on either side are left out.

    Attributes:
        fields: the fields of both texts.
        key: everything that determines the tokens, as plain data.

    Raises:
        DataError: the tokenizer marks the languages of texts.
    """

    def __init__(self, tokenizer: Any, fields: PairFields) -> None:
        self._tokenizer, self.fields = tokenizer, fields
        self._frames = frames_of(tokenizer)
        self.key = ["pairs", tokenizer_state(tokenizer), self._frames]

    def encode(self, pieces: Sequence[Piece]) -> Marked:
        """The tokens of source, target, source, target and so on, one behind the other: [tokens]."""
        pairs = [piece.text for piece in pieces if all(piece.text)]
        parts: list[list[int]] = []
        if pairs:
            sides = [self._side(number, [pair[number] for pair in pairs]) for number in (0, 1)]
            parts = [text for pair in zip(*sides, strict=True) if all(pair) for text in pair]
        return packed(parts, [True] * len(parts))

    def _side(self, number: int, texts: list[str]) -> list[list[int]]:
        argument, frame = ("text", "text_target")[number], self._frames[number]
        found = self._tokenizer(**{argument: texts}, add_special_tokens=False, verbose=False)
        return [[*frame.before, *ids, *frame.after] for ids in found["input_ids"]]


class DecoderInput(NamedTuple):
    """How a decoder's input is derived from its targets.

    Attributes:
        start: the first token of the input.
        pad: the padding token.
        last_first: whether the input begins with the target's last token instead of `start`, as for mBART.
    """

    start: int
    pad: int
    last_first: bool = False


def collated(sources: Sequence[Integers], targets: Sequence[Integers], decoder: DecoderInput) -> dict[str, Integers]:
    """Pad texts on the right to the longest of the batch.

    Args:
        sources: tokens for the encoder, [b] of different lengths.
        targets: tokens for the decoder to predict, [b] of different lengths, none of them empty.
        decoder: how its input is derived from the targets.

    Returns:
        `input_ids` [b, Le]; `labels` [b, Ld], IGNORED behind the end of a target; `decoder_input_ids` [b, Ld], the
        targets shifted right by one; and `attention_mask` [b, Le] if the sources differ in length.
    """
    starts = [target[-1] if decoder.last_first else decoder.start for target in targets]
    shifted = [np.concatenate([[start], target[:-1]]) for start, target in zip(starts, targets, strict=True)]
    batch = {
        "input_ids": _padded(sources, decoder.pad),
        "labels": _padded(targets, IGNORED),
        "decoder_input_ids": _padded(shifted, decoder.pad),
    }
    mask = _padded([np.ones(len(source), np.int64) for source in sources], 0)
    return batch if mask.all() else batch | {"attention_mask": mask}


def _padded(rows: Sequence[Integers], value: int) -> Integers:
    whole = np.full((len(rows), max(map(len, rows))), value, np.int64)
    for row, tokens in zip(whole, rows, strict=True):
        row[: len(tokens)] = tokens
    return whole


def shortened(text: npt.NDArray[Any], longest: int, closing: int) -> npt.NDArray[Any]:
    """A text truncated to its first tokens and the special tokens at its end: [at most `longest`].

    Args:
        text: tokens.
        longest: the most tokens to keep.
        closing: how many of the last ones are special.
    """
    closing = min(closing, longest)
    return text if len(text) <= longest else np.concatenate([text[: longest - closing], text[len(text) - closing :]])


class PairSampler(Sampler):
    """Pairs in a new order each epoch, padded to the longest of their batch.

    Args:
        length: the most tokens of either text; longer texts are truncated.
        tokenizer: the model's tokenizer.
        decoder: how the decoder's input is derived.

    Attributes:
        raw_tokens: the mean number of tokens in both texts of a pair, over the sources by their shares; before
            `measure`, the most.
        longest: tokens of the longest source and the longest target.
        notes: messages about the pairs for the user.
    """

    shortest = 1

    def __init__(self, length: int, tokenizer: Any, decoder: DecoderInput) -> None:
        self._length, self._decoder = length, decoder
        self._closing = [len(frame.after) for frame in frames_of(tokenizer)]
        self.raw_tokens = Fraction(2 * length)

    def measure(self, sources: Sequence[tuple[TokenSource, int]]) -> None:
        """See `Sampler.measure`."""
        shares = sum(share for _, share in sources)
        self.raw_tokens, notes, longest = Fraction(0), list[str](), np.zeros(2, np.int64)
        for pairs, share in sources:
            whole = _lengths(pairs)
            lengths = np.minimum(whole, self._length)
            self.raw_tokens += Fraction(share, shares) * Fraction(int(lengths.sum()), len(lengths))
            longest = np.maximum(longest, lengths.max(axis=0))
            if cut := int((whole > self._length).any(axis=1).sum()):
                notes.append(f"{cut} of the {len(whole)} pairs of {pairs.label} are truncated to {self._length} tokens")
            if left_out := pairs.pieces - len(whole):
                notes.append(f"{left_out} rows of {pairs.label} with an empty source or target are skipped")
        self.longest, self.notes = (int(longest[0]), int(longest[1])), notes

    def tokens_for(self, samples: int, window: int) -> None:  # noqa: ARG002
        """Pairs are few compared with running text, and are read completely."""
        return

    def count(self, tokens: TokenSource) -> int:
        """The number of pairs."""
        return len(tokens.ends) // 2

    def cut(self, tokens: TokenSource, number: int, key: int, window: int) -> int:  # noqa: ARG002
        """The number of a pair; see `Sampler.cut`."""
        epoch, place = divmod(number, self.count(tokens))
        return permuted(place, self.count(tokens), mix(key, epoch, 2))

    def first(self, tokens: TokenSource, limit: int) -> list[int]:
        """The first pairs whose tokens add up to the limit, and at least one."""
        sums = np.cumsum(np.minimum(_lengths(tokens), self._length).sum(axis=1))
        return list(range(max(1, int(np.searchsorted(sums, limit, side="right")))))

    def batch(self, places: Sequence[tuple[TokenSource, int]], keys: Keys) -> dict[str, Integers]:  # noqa: ARG002
        """A batch of pairs; see `collated`."""
        sides = [[self._text(tokens, 2 * number + side) for tokens, number in places] for side in (0, 1)]
        return collated(sides[0], sides[1], self._decoder)

    def _text(self, tokens: TokenSource, number: int) -> Integers:
        """Text `number` of a source, truncated; the special tokens at the end are kept."""
        start = int(tokens.ends[number - 1]) if number else 0
        text = tokens.read(start, int(tokens.ends[number]) - start)
        return shortened(text, self._length, self._closing[number % 2])


def _lengths(pairs: TokenSource) -> Integers:
    """The tokens of each source and target, special tokens included: [pairs, 2]."""
    return np.diff(pairs.ends, prepend=0).reshape(-1, 2)
