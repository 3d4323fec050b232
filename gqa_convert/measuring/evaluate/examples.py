"""Inputs and targets of an encoder-decoder: T5's span corruption of a text, or pairs of texts."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gqa_convert.errors import DataError
from gqa_convert.text.documents import Piece
from gqa_convert.text.framing import frame_around
from gqa_convert.text.objectives import SPAN_CORRUPTION
from gqa_convert.text.order import mix
from gqa_convert.text.pair_files import shortened
from gqa_convert.text.samples import make_sampler
from gqa_convert.text.scoring.material import Batch, Integers, Material
from gqa_convert.text.scoring.texts import byte_ends, encode
from gqa_convert.text.scoring.windows import longest_first
from gqa_convert.text.spans import SpanCut
from gqa_convert.text.tokenizing import TextEncoder, batches


def span_material(
    pieces: Sequence[Piece], tokenizer: Any, *, start: int, length: int, batch: int, seed: int
) -> Material:
    """A text with 15% of its tokens removed in spans of three, as in T5's pretraining; the spans and their sentinels
    are scored.

    Args:
        pieces: documents or parts of them, in order.
        tokenizer: of a T5 model.
        start: the first token of the decoder's input.
        length: tokens of the encoder's input.
        batch: examples at a time.
        seed: of the choice of spans.

    Raises:
        DataError: no span fits the length, the tokenizer has too few sentinels, or the text is shorter than one
            example. A remainder at the end of the text is not used.
    """
    try:
        sampler = make_sampler(tokenizer, SPAN_CORRUPTION, length, document_mask=False, decoder_start=start)
    except DataError as problem:  # in the words of a recipe
        raise DataError(str(problem).replace("sequence_length", "--context")) from None
    encoder = TextEncoder(tokenizer, closed=False)
    text = np.concatenate([np.empty(0, np.int64), *(encoder.encode(some, begins=True)[0] for some in batches(pieces))])
    tokens = _Tokens(text)
    cuts: list[SpanCut] = sampler.first(tokens, len(text))
    if not cuts:
        raise DataError(
            f"the text comes to {len(text)} tokens, and an example of span corruption with {length} encoder tokens takes "
            f"{sampler.shortest}: name more text, or lower --context"
        )
    made = sampler.batch([(tokens, cut) for cut in cuts], [(mix(seed), number) for number in range(len(cuts))])
    return _material(list(made["input_ids"]), list(made["labels"]), None, start, batch)


def pair_material(
    pairs: Sequence[tuple[str, str]],
    tokenizer: Any,
    *,
    start: int,
    context: int,
    batch: int,
    starts_with_last: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Material:
    """Pairs of a source and a target, each with the special tokens of the tokenizer, which are scored too.

    Args:
        pairs: sources and targets.
        tokenizer: the model's.
        start: the first token of the decoder's input.
        context: maximum number of tokens of each; a longer text is cut before its closing special tokens.
        batch: pairs at a time.
        starts_with_last: whether the decoder's input begins with the target's last token instead, as mBART's does.
        progress: called with the number of pairs that were tokenised and the number of all pairs.
    """
    sources, targets, sizes, truncated = [], [], [], 0
    closing, target_closing = (len(frame_around(tokenizer, argument).after) for argument in ("text", "text_target"))
    for number, (source, target) in enumerate(pairs):
        read, _ = encode(tokenizer, source, special=True)
        written, ends = encode(tokenizer, target, special=True, target=True)
        truncated += len(read) > context or len(written) > context
        sources.append(shortened(read, context, closing))
        targets.append(shortened(written, context, target_closing))
        sizes.append(shortened(np.diff(byte_ends(target, ends), prepend=0), context, target_closing))
        progress(number + 1, len(pairs))
    flat = np.concatenate([np.empty(0, np.int64), *sizes])
    return _material(sources, targets, flat, start, batch, truncated, starts_with_last=starts_with_last)


class _Tokens:
    """Tokens in memory with the interface of a `TokenSource` that a sampler uses."""

    fingerprint = ""
    grows = False

    def __init__(self, tokens: Integers) -> None:
        self._tokens = tokens

    def size(self, needed: int | None = None) -> tuple[int, bool]:  # noqa: ARG002
        return len(self._tokens), True

    def read(self, start: int, count: int) -> Integers:
        return self._tokens[start : start + count]

    def close(self) -> None:
        pass


def _material(
    sources: list[Integers],
    targets: list[Integers],
    sizes: Integers | None,
    start: int,
    batch: int,
    truncated: int = 0,
    *,
    starts_with_last: bool = False,
) -> Material:
    ids, lengths = np.concatenate(targets), [len(target) for target in targets]
    blocks = np.repeat(np.arange(len(targets)), lengths)
    firsts = [int(target[-1]) if starts_with_last and len(target) else start for target in targets]
    digest = hashlib.sha256(
        np.array([*(firsts if starts_with_last else [start]), *map(len, sources), *lengths], np.int64).tobytes()
        + ids.tobytes()
    )
    for source in sources:
        digest.update(source.tobytes())
    made = PairBatches(sources, targets, firsts, batch)
    return Material(ids, np.ones(len(ids), np.bool_), sizes, blocks, len(targets), made, digest.hexdigest(), truncated)


class PairBatches:
    """Pairs in batches; the encoder's padding is masked, the decoder's needs no mask.

    Args:
        sources: tokens for the encoder.
        targets: tokens that the decoder is to predict.
        starts: the first token of the decoder's input, for each pair.
        batch: pairs at a time.
    """

    def __init__(
        self, sources: Sequence[Integers], targets: Sequence[Integers], starts: Sequence[int], batch: int
    ) -> None:
        self._sources, self._targets, self._starts = sources, targets, starts
        self._firsts = np.cumsum([0, *(len(target) for target in targets)])
        self._batches = longest_first(
            [len(source) + len(target) for source, target in zip(sources, targets, strict=True)], batch
        )

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, number: int) -> Batch:
        chosen = self._batches[number]
        longest, longest_target = (max(len(side[each]) for each in chosen) for side in (self._sources, self._targets))
        read, mask = np.zeros((2, len(chosen), longest), np.int64)
        decoder = (
            np.zeros((len(chosen), longest_target), np.int64)
            + np.array([self._starts[each] for each in chosen])[:, None]
        )
        rows, places = [], []
        for row, each in enumerate(chosen):
            source, target = self._sources[each], self._targets[each]
            read[row, : len(source)], mask[row, : len(source)] = source, 1
            decoder[row, 1 : len(target)] = target[:-1]
            rows.append(np.arange(row * longest_target, row * longest_target + len(target)))
            places.append(np.arange(self._firsts[each], self._firsts[each + 1]))
        inputs = {"input_ids": read, "decoder_input_ids": decoder}
        if not mask.all():
            inputs["attention_mask"] = mask
        return Batch(
            inputs,
            np.concatenate(rows),
            np.concatenate([self._targets[each] for each in chosen]),
            np.concatenate(places),
        )
