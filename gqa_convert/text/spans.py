"""Samples for encoder-decoder models: T5's span corruption and UL2's mixture of denoisers.

Spans of a block are removed, each is replaced by a sentinel, and the decoder predicts each span after its sentinel
(Raffel et al. 2020, section 3.1.4). The block length is chosen so that the encoder's input has exactly
`sequence_length` tokens, end-of-text included, and is never padded. The targets of UL2's denoisers (Tay et al. 2022,
table 1) differ in length; they are padded on the right to the longest of the batch, where a causal decoder needs no
mask and the labels are ignored.

UL2's S-denoiser removes the end of the text. Its length is uniform, with the mean that table 1 states: the block keeps
its end, and as much text as fits the encoder precedes the removed part, also from before the block.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gqa_convert.errors import DataError
from gqa_convert.text.labels import IGNORED
from gqa_convert.text.order import Integers, mix, permuted
from gqa_convert.text.packing import shuffled, window_samples
from gqa_convert.text.token_files import TokenSource
from gqa_convert.text.tokenizing import end_of_text

Keys = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Denoiser:
    """A way to corrupt text.

    Attributes:
        density: the share of tokens that is removed.
        mean_length: the mean length of the spans; None for a single span of random length at the end of the block.
        mode: the mode token that the encoder's input begins with.
    """

    density: float
    mean_length: float | None
    mode: str = ""


T5 = (Denoiser(0.15, 3.0),)
UL2 = (
    Denoiser(0.15, 3.0, "[NLU]"),
    Denoiser(0.15, 8.0, "[NLU]"),
    Denoiser(0.25, None, "[S2S]"),
    Denoiser(0.5, 3.0, "[NLG]"),
    Denoiser(0.5, 8.0, "[NLG]"),
    Denoiser(0.15, 64.0, "[NLG]"),
    Denoiser(0.5, 64.0, "[NLG]"),
)
"""The denoisers R, R, S, X, X, X, X, used equally often, with the mode tokens of the published model."""


class Shape(NamedTuple):
    """The sizes of a denoised block.

    Attributes:
        raw: the tokens of text.
        noise: the tokens removed from the text.
        spans: the number of spans removed.
    """

    raw: int
    noise: int
    spans: int


def shape_for(denoiser: Denoiser, length: int, most_spans: int | None = None) -> Shape | None:
    """The longest block whose encoder input, with a sentinel per span and end-of-text, has exactly `length` tokens.

    Args:
        denoiser: the denoiser's settings.
        length: the tokens of the encoder's input, without the mode token.
        most_spans: the number of sentinels available.

    Returns:
        The shape, or None if no block has so short an input.
    """

    def cut(raw: int) -> tuple[int, Shape]:
        """The length of a block's encoder input, and the shape of the block."""
        noise = min(max(round(raw * denoiser.density), 1), raw - 1)
        spans = 1 if denoiser.mean_length is None else max(round(noise / denoiser.mean_length), 1)
        spans = min(spans, raw - noise, spans if most_spans is None else most_spans)
        return raw - noise + spans + 1, Shape(raw, noise, spans)

    blocks = range(2, 4 * length + 2)
    at = (
        bisect_right(blocks, length, key=lambda raw: cut(raw)[0]) - 1
    )  # the input length does not decrease with the block length
    if at < 0:
        return None
    inputs, shape = cut(blocks[at])
    return shape if inputs == length else None


def segmented(total: int, parts: int, keys: Keys) -> Integers:
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
        cuts[:, 1:-1] = np.sort(np.argpartition(keys, parts - 2, axis=1)[:, : parts - 1], axis=1) + 1
    return np.diff(cuts, axis=1)


def corrupted(
    raw: Integers, shape: Shape, keys: Keys, sentinels: Integers, eos: int, mode: Sequence[int] = ()
) -> tuple[Integers, Integers]:
    """Blocks without their spans, and the removed spans. As in T5, text and spans alternate, beginning with text.

    Args:
        raw: [b, shape.raw] tokens.
        shape: the shape of the corrupted blocks.
        keys: [b, shape.raw - 2] random numbers.
        sentinels: token ids, that of `<extra_id_0>` first.
        eos: the end-of-text token, which ends both.
        mode: tokens that the inputs begin with.

    Returns:
        Inputs [b, mode + raw - noise + spans + 1] and targets [b, noise + spans + 1].
    """
    rows, (length, noise, spans) = len(raw), shape
    kept = length - noise
    text_lengths = segmented(kept, spans, keys[:, : kept - 1])
    span_lengths = segmented(noise, spans, keys[:, kept - 1 :])
    lengths = np.stack([text_lengths, span_lengths], axis=2).reshape(rows, 2 * spans)
    begins = np.zeros((rows, length), np.int8)
    np.put_along_axis(begins, np.cumsum(lengths, axis=1)[:, :-1], 1, axis=1)
    is_noise = np.logical_xor.accumulate(begins.astype(bool), axis=1)
    marks, order = sentinels[:spans], np.arange(spans)
    inputs = np.empty((rows, len(mode) + kept + spans + 1), np.int64)
    inputs[:, : len(mode)], inputs[:, -1] = mode, eos
    inputs[:, len(mode) : -1] = _interleaved(
        raw[~is_noise], np.cumsum(text_lengths, axis=1) + order, marks, kept + spans
    )
    targets = np.empty((rows, noise + spans + 1), np.int64)
    targets[:, -1] = eos
    targets[:, :-1] = _interleaved(
        raw[is_noise], np.cumsum(span_lengths, axis=1) - span_lengths + order, marks, noise + spans
    )
    return inputs, targets


def _interleaved(tokens: Integers, places: Integers, marks: Integers, length: int) -> Integers:
    """Rows of tokens with the sentinels inserted at their positions: [b, length]."""
    rows = np.empty((len(places), length), np.int64)
    free = np.ones(rows.shape, bool)
    np.put_along_axis(free, places, False, axis=1)
    np.put_along_axis(rows, places, np.broadcast_to(marks, places.shape), axis=1)
    rows[free] = tokens
    return rows


def sentinel_ids(tokenizer: Any) -> Integers:
    """The ids of `<extra_id_0>`, `<extra_id_1>`, ..., as many as the tokenizer has (mT5's sentinels begin with its
    word-boundary mark).

    Raises:
        DataError: the tokenizer has no sentinels.
    """
    vocabulary = tokenizer.get_vocab()
    found: list[int] = []
    while (
        number := vocabulary.get(f"<extra_id_{len(found)}>", vocabulary.get(f"▁<extra_id_{len(found)}>"))
    ) is not None:
        found.append(number)
    if not found:
        raise DataError("the tokenizer has no sentinel tokens <extra_id_0>, <extra_id_1>, ...: use the objective pairs")
    return np.array(found, np.int64)


def has_sentinels(tokenizer: Any) -> bool:
    """Whether the tokenizer has sentinel tokens, as T5's have."""
    try:
        return len(sentinel_ids(tokenizer)) > 0
    except DataError:
        return False


class SpanCut(NamedTuple):
    """The location of a block, and its denoiser."""

    start: int
    kind: int


class SpanSampler:
    """Denoised blocks of one or several kinds.

    An epoch is divided into runs, each of which holds one block of every kind. The kinds are therefore equally
    frequent, each token is predicted at most once in an epoch, and any sample can be located without the others. The tokens
    left over are fewer than a run; the next epoch begins at another offset.

    Args:
        length: the tokens of the encoder's input.
        tokenizer: a tokenizer with sentinels and an end-of-text token.
        denoisers: the kinds of corruption.
        decoder_start: the first token of the decoder's input.
        cap_spans: make fewer and longer spans if there are not enough sentinels.

    Attributes:
        notes: a message if the tokenizer splits mode words, for the user.
    """

    longest: None = None

    def __init__(
        self, length: int, tokenizer: Any, denoisers: Sequence[Denoiser], *, decoder_start: int, cap_spans: bool
    ) -> None:
        self._eos, self._start = end_of_text(tokenizer), decoder_start
        self._sentinels = sentinel_ids(tokenizer)
        modes = {
            kind.mode: tokenizer(kind.mode, add_special_tokens=False)["input_ids"] if kind.mode else []
            for kind in denoisers
        }
        self._modes: list[list[int]] = [modes[kind.mode] for kind in denoisers]
        self._continues = [kind.mean_length is None for kind in denoisers]
        self.notes = _split_modes(modes)
        self.shapes = [
            _checked_shape(kind, length - len(mode), len(self._sentinels), cap_spans=cap_spans)
            for kind, mode in zip(denoisers, self._modes, strict=True)
        ]
        self.shortest = sum(shape.raw for shape in self.shapes)
        self.raw_tokens = self.shortest // len(self.shapes)
        self._run = lru_cache(64)(self._run_of)

    def _run_of(self, key: int | None) -> list[SpanCut]:
        """The kinds in their order within an epoch's runs, and the offset of each in a run."""
        kinds = [
            number if key is None else permuted(number, len(self.shapes), key) for number in range(len(self.shapes))
        ]
        starts = np.cumsum([0, *(self.shapes[kind].raw for kind in kinds)])
        return [SpanCut(int(start), kind) for start, kind in zip(starts, kinds, strict=False)]

    def cut(self, tokens: TokenSource, number: int, key: int, *, window: int | None) -> SpanCut:
        """See `packing.cut`."""
        kinds = len(self.shapes)
        in_window = kinds if window is None else window_samples(window, self.shortest, kinds)
        end = (number // in_window + 1) * in_window
        size, complete = tokens.size(None if window is None else end // kinds * self.shortest)
        epoch, place = divmod(number, self.count(size)) if complete else (0, number)
        if window is not None and epoch == 0:
            return self._at(shuffled(place, in_window, self.count(size) if complete else None, key), 0, None)
        place = permuted(place, self.count(size), mix(key, epoch, 2))
        start, kind = self._at(place, mix(key, epoch, 1), mix(key, epoch, 3))
        return SpanCut(start % size, kind)

    def _at(self, place: int, offset: int, key: int | None) -> SpanCut:
        run, slot = divmod(place, len(self.shapes))
        start, kind = self._run(key)[slot]
        return SpanCut(offset + run * self.shortest + start, kind)

    def count(self, size: int) -> int:
        """The number of samples in an epoch."""
        return size // self.shortest * len(self.shapes)

    def first(self, tokens: TokenSource, limit: int) -> list[SpanCut]:
        """The locations of the whole blocks within the first tokens."""
        size, _ = tokens.size(limit)
        cuts: list[SpanCut] = []
        while (place := self._at(len(cuts), 0, None)).start + self.shapes[place.kind].raw <= min(limit, size):
            cuts.append(place)
        return cuts

    def batch(
        self, places: Sequence[tuple[TokenSource, SpanCut]], keys: Sequence[tuple[int, int]]
    ) -> dict[str, Integers]:
        """Denoised samples.

        Returns:
            `input_ids` [b, Le], `labels` [b, Ld] and `decoder_input_ids` [b, Ld], which are the labels shifted right by
            one.
        """
        kinds = np.array([place.kind for _, place in places])
        made = {
            int(kind): self._of_kind(int(kind), np.flatnonzero(kinds == kind), places, keys)
            for kind in np.unique(kinds)
        }
        longest = max(targets.shape[1] for _, targets in made.values())
        inputs = np.empty((len(places), next(iter(made.values()))[0].shape[1]), np.int64)
        labels = np.full((len(places), longest), IGNORED, np.int64)
        for kind, (some_inputs, some_targets) in made.items():
            inputs[kinds == kind] = some_inputs
            labels[kinds == kind, : some_targets.shape[1]] = some_targets
        decoder = np.full_like(labels, self._start)
        decoder[:, 1:] = np.where(labels[:, :-1] == IGNORED, self._start, labels[:, :-1])
        return {"input_ids": inputs, "labels": labels, "decoder_input_ids": decoder}

    def _of_kind(
        self, kind: int, rows: Integers, places: Sequence[tuple[TokenSource, SpanCut]], keys: Sequence[tuple[int, int]]
    ) -> tuple[Integers, Integers]:
        shape = self.shapes[kind]
        if self._continues[kind]:
            return self._continuations(kind, rows, places, keys)
        raw, drawn = np.empty((len(rows), shape.raw), np.int64), np.empty((len(rows), shape.raw - 2), np.uint64)
        for number, row in enumerate(rows):
            tokens, place = places[row]
            raw[number] = tokens.read(place.start, shape.raw)
            drawn[number] = np.random.Philox(key=np.array(keys[row], np.uint64)).random_raw(shape.raw - 2)
        return corrupted(raw, shape, drawn, self._sentinels, self._eos, self._modes[kind])

    def _continuations(
        self, kind: int, rows: Integers, places: Sequence[tuple[TokenSource, SpanCut]], keys: Sequence[tuple[int, int]]
    ) -> tuple[Integers, Integers]:
        """Inputs and targets of the S-denoiser; shorter targets are followed by IGNORED."""
        shape, mode = self.shapes[kind], self._modes[kind]
        most = 2 * shape.noise - 1
        kept = shape.raw - shape.noise
        inputs = np.empty((len(rows), len(mode) + kept + 2), np.int64)
        inputs[:, : len(mode)], inputs[:, -2], inputs[:, -1] = mode, self._sentinels[0], self._eos
        targets = np.full((len(rows), most + 2), IGNORED, np.int64)
        targets[:, 0] = self._sentinels[0]
        for number, row in enumerate(rows):
            tokens, place = places[row]
            (drawn,) = np.random.Philox(key=np.array(keys[row], np.uint64)).random_raw(1)
            removed = min(1 + int(drawn) % most, place.start + shape.noise)  # no text precedes the first block
            text = tokens.read(place.start + shape.noise - removed, kept + removed)
            inputs[number, len(mode) : -2] = text[:kept]
            targets[number, 1 : removed + 1], targets[number, removed + 1] = text[kept:], self._eos
        return inputs, targets


def _split_modes(modes: Mapping[str, Sequence[int]]) -> list[str]:
    """A message about mode words that the tokenizer splits; empty if there are none."""
    split = [mode for mode, tokens in modes.items() if len(tokens) > 1]
    if not split:
        return []
    pieces = ", ".join(str(len(modes[mode])) for mode in split)
    named = f"{', '.join(split[:-1])} and {split[-1]}" if len(split) > 1 else split[0]
    message = (
        f"the tokenizer has no tokens {named}: the mode words of ul2 are read as {pieces} ordinary pieces, which models that were not "
        "pretrained with UL2 do not know yet"
    )
    return [message]


def _checked_shape(denoiser: Denoiser, length: int, sentinels: int, *, cap_spans: bool) -> Shape:
    shape = shape_for(denoiser, length, sentinels if cap_spans else None)
    if shape is None:
        raise DataError(
            f"sequence_length leaves room for only {max(length, 0)} tokens of text with this objective: make it larger"
        )
    if shape.spans > sentinels:
        fits = length
        while fits > 3 and ((smaller := shape_for(denoiser, fits)) is None or smaller.spans > sentinels):
            fits -= 1
        raise DataError(
            f"an encoder input of {length} tokens needs {shape.spans} sentinel tokens, the tokenizer has {sentinels}: "
            f"make sequence_length {fits} or less"
        )
    return shape
