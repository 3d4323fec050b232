"""Pairs of texts for encoder-decoders, and samples that are whole documents of different lengths.

Shape legend: b rows, Le tokens of the longest encoder input, Ld tokens of the longest target.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gqa_convert.data.documents import PAIR_KEYS, PairFields, Piece
from gqa_convert.data.labels import IGNORED
from gqa_convert.data.objectives import SampleSettings
from gqa_convert.data.order import Integers, mix, permuted
from gqa_convert.data.sampler import Batch, Keys, Sampler
from gqa_convert.data.sources import Source, TextSource
from gqa_convert.data.token_files import Encoder, Marked, TokenSource, ids_of, packed
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


def collated(sources: Sequence[Integers], targets: Sequence[Integers], decoder: DecoderInput) -> Batch:
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
        "input_ids": padded(sources, decoder.pad),
        "labels": padded(targets, IGNORED),
        "decoder_input_ids": padded(shifted, decoder.pad),
    }
    mask = padded([np.ones(len(source), np.int64) for source in sources], 0)
    return batch if mask.all() else batch | {"attention_mask": mask}


def padded(rows: Sequence[Integers], value: int) -> Integers:
    """Rows of different lengths as one array, filled on the right: [b, longest]."""
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


class DocumentSampler(Sampler):
    """Whole documents in a new order each epoch, one or more for a sample, padded to the longest of their batch.
    `sequence_length` is the most tokens of a document; longer ones are truncated.

    Attributes:
        per_sample: the documents of a sample.
        noun: what samples are called in messages.
        raw_tokens: the mean number of tokens in a sample, over the sources by their shares; before `measure`, the most.
    """

    per_sample: int
    noun: str

    def __init__(self, settings: SampleSettings) -> None:
        super().__init__(settings)
        self.raw_tokens = Fraction(self.per_sample * settings.length)

    def measure(self, sources: Sequence[tuple[TokenSource, int]]) -> None:
        """See `Sampler.measure`."""
        shares, longest = sum(share for _, share in sources), self.settings.length
        self.raw_tokens, notes = Fraction(0), list(self.notes)
        for tokens, share in sources:
            whole = self._lengths(tokens)
            kept = int(np.minimum(whole, longest).sum())
            self.raw_tokens += Fraction(share, shares) * Fraction(kept, len(whole))
            cut = int((whole > longest).any(axis=1).sum())
            if cut:
                notes.append(
                    f"{cut} of the {len(whole)} {self.noun} of {tokens.label} are truncated to {longest} tokens"
                )
            left_out = tokens.pieces - len(whole)
            if left_out:
                notes.append(f"{left_out} rows of {tokens.label} with an empty text are skipped")
        self.notes = notes

    def tokens_for(self, samples: int, window: int) -> None:  # noqa: ARG002
        """Such documents are few compared with running text, and are read completely."""
        return

    def count(self, tokens: TokenSource) -> int:
        """The number of samples in a source."""
        return len(tokens.ends) // self.per_sample

    def cut(self, tokens: TokenSource, number: int, key: int, window: int) -> int:  # noqa: ARG002
        """The number of a sample within its source; see `Sampler.cut`."""
        epoch, place = divmod(number, self.count(tokens))
        return permuted(place, self.count(tokens), mix(key, epoch, 2))

    def first(self, tokens: TokenSource, limit: int) -> list[int]:
        """The first samples whose tokens add up to the limit, and at least one."""
        sums = np.cumsum(np.minimum(self._lengths(tokens), self.settings.length).sum(axis=1))
        return list(range(max(1, int(np.searchsorted(sums, limit, side="right")))))

    def document(self, tokens: TokenSource, number: int, closing: int) -> Marked:
        """A document with its marks, truncated; special tokens at its end are kept.

        Args:
            tokens: of the source.
            number: of the document.
            closing: how many of its last tokens are special.
        """
        start = int(tokens.ends[number - 1]) if number else 0
        return shortened(tokens.marked(start, int(tokens.ends[number]) - start), self.settings.length, closing)

    def _lengths(self, tokens: TokenSource) -> Integers:
        """The tokens of each document, special ones included: [samples, per_sample]."""
        return np.diff(tokens.ends, prepend=0).reshape(-1, self.per_sample)


class PairSampler(DocumentSampler):
    """Pairs of texts: what the encoder reads, and what the decoder learns to write."""

    per_sample = 2
    noun = "pairs"

    def __init__(self, settings: SampleSettings) -> None:
        super().__init__(settings)
        start, pad = settings.first_token, settings.tokenizer.pad_token_id
        self._decoder = DecoderInput(start, start if pad is None else int(pad), settings.starts_with_last)
        self._closing = [len(frame.after) for frame in frames_of(settings.tokenizer)]

    def encoder(self, source: Source, text: TextSource) -> Encoder:
        """See `PairEncoder`."""
        if source.source_field is None or source.target_field is None:
            raise DataError(f"the objective is pairs, and {text.label} does not name their fields: add {PAIR_KEYS}")
        return PairEncoder(self.settings.tokenizer, PairFields(source.source_field, source.target_field))

    def batch(self, places: Sequence[tuple[TokenSource, int]], keys: Keys) -> Batch:  # noqa: ARG002
        """A batch of pairs; see `collated`."""
        sides = []
        for side, closing in enumerate(self._closing):
            sides.append([ids_of(self.document(tokens, 2 * number + side, closing)) for tokens, number in places])
        return collated(sides[0], sides[1], self._decoder)

    def shapes(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:  # noqa: ARG002
        """See `Sampler.shapes`: texts are taken to be as long as they may be."""
        return {"input_ids": (self.settings.length,), "decoder_input_ids": (self.settings.length,)}
