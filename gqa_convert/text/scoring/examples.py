"""Inputs and targets of an encoder-decoder: T5's span corruption of a text, or pairs of texts."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gqa_convert.data.documents import Piece, TextField
from gqa_convert.data.order import mix
from gqa_convert.data.pairs import frame_around, shortened
from gqa_convert.data.span_corruption import SpanCorruption
from gqa_convert.data.token_files import batched, ids_of
from gqa_convert.data.tokenizing import TextEncoder
from gqa_convert.errors import DataError
from gqa_convert.text.scoring.material import Batch, Integers, Material
from gqa_convert.text.scoring.texts import byte_ends, encode
from gqa_convert.text.scoring.windows import longest_first


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
        corruption = SpanCorruption(tokenizer, start)
        raw = corruption.shape_for(length).raw
    except DataError as problem:  # in the words of a recipe
        raise DataError(str(problem).replace("sequence_length", "--window")) from None
    encoder = TextEncoder(tokenizer, TextField(), closed=False)
    ids = np.concatenate([ids_of(encoder.encode(some)) for some in batched(pieces)])
    count = len(ids) // raw
    if not count:
        raise DataError(
            f"the text comes to {len(ids)} tokens, and an example of span corruption with {length} encoder tokens takes "
            f"{raw}: name more text, or lower --window"
        )
    keys = [(mix(seed), number) for number in range(count)]
    made = corruption.batch(ids[: count * raw].reshape(count, raw), keys)
    return _material(list(made["input_ids"]), list(made["labels"]), [start] * count, batch)


def pair_material(
    pairs: Sequence[tuple[str, str]],
    tokenizer: Any,
    *,
    start: int | None,
    length: int,
    batch: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Material:
    """Pairs of a source and a target, each with the special tokens of the tokenizer, which are scored too.

    Args:
        pairs: sources and targets.
        tokenizer: the model's.
        start: the first token of the decoder's input; None for the target's last token, with which mBART's begins.
        length: maximum number of tokens of each; a longer text is cut before its closing special tokens.
        batch: pairs at a time.
        progress: called with the number of pairs that were tokenised and the number of all pairs.
    """
    closing, target_closing = (len(frame_around(tokenizer, argument).after) for argument in ("text", "text_target"))
    sources, targets, starts, sizes, truncated = [], [], [], [], 0
    for number, (source, target) in enumerate(pairs):
        read, _ = encode(tokenizer, source, special=True)
        written, ends = encode(tokenizer, target, special=True, target=True)
        truncated += len(read) > length or len(written) > length
        nbytes = np.diff(byte_ends(target, ends), prepend=0)
        sources.append(shortened(read, length, closing))
        targets.append(shortened(written, length, target_closing))
        sizes.append(shortened(nbytes, length, target_closing))
        starts.append(int(targets[-1][-1]) if start is None else start)
        progress(number + 1, len(pairs))
    note = f"{truncated} pairs were cut to the window" if truncated else None
    return _material(sources, targets, starts, batch, np.concatenate(sizes), note)


def _material(
    sources: Sequence[Integers],
    targets: Sequence[Integers],
    starts: Sequence[int],
    batch: int,
    sizes: Integers | None = None,
    note: str | None = None,
) -> Material:
    """The material of pairs, each of which is a block.

    Args:
        sources: tokens for the encoder.
        targets: tokens that the decoder is to predict.
        starts: the first token of the decoder's input, for each pair.
        batch: pairs at a time.
        sizes: [n], the bytes of each token of the targets.
        note: what was cut.
    """
    lengths = np.array([len(target) for target in targets])
    firsts = np.cumsum(lengths) - lengths
    order = longest_first([len(source) + len(target) for source, target in zip(sources, targets, strict=True)], batch)
    made = []
    for chosen in order:
        read, mask = np.zeros((2, len(chosen), max(len(sources[each]) for each in chosen)), np.int64)
        width = lengths[chosen].max()
        decoder = np.zeros((len(chosen), width), np.int64)
        rows, places = [], []
        for row, each in enumerate(chosen):
            source, target = sources[each], targets[each]
            read[row, : len(source)], mask[row, : len(source)] = source, 1
            decoder[row, 0], decoder[row, 1 : len(target)] = starts[each], target[:-1]
            scored = np.arange(len(target))
            rows.append(row * width + scored)
            places.append(firsts[each] + scored)
        inputs = {"input_ids": read, "decoder_input_ids": decoder}
        if not mask.all():
            inputs["attention_mask"] = mask
        wanted = np.concatenate([targets[each] for each in chosen])
        made.append(Batch(inputs, np.concatenate(rows), wanted, np.concatenate(places)))
    ids, count = np.concatenate(targets), len(targets)
    digest = hashlib.sha256(np.array(starts).tobytes() + lengths.tobytes())
    for part in (*sources, ids):
        digest.update(np.array(part).tobytes())
    blocks = np.repeat(np.arange(count), lengths)
    return Material(ids, np.ones(len(ids), np.bool_), sizes, blocks, count, made, digest.hexdigest(), note)
