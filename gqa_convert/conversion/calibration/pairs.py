"""Pairs of texts as calibration of an encoder-decoder: what its encoder reads, and what its decoder is to write.

Nothing in a batch is padding. Pairs of about the same lengths are put together instead, and cut to the shortest of them,
as sounds and their texts are (`gqa_convert.data.speech`).
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gqa_convert.conversion.options import BATCH_TOKENS
from gqa_convert.data.decoder_start import decoder_start, starts_with_last
from gqa_convert.data.documents import Fields
from gqa_convert.data.hub import default_cache
from gqa_convert.data.order import Integers, divided, mix, permuted
from gqa_convert.data.pairs import PairEncoder, refuse_languages, shortened
from gqa_convert.data.sources import Source, TextSource
from gqa_convert.data.token_files import tokenize
from gqa_convert.runtime.json_objects import Config

if TYPE_CHECKING:
    from torch import Tensor

INPUT = "source"
_FIELDS = (INPUT, "target")
"""Of rows that hold pairs, where nothing is stated."""
_OVERSAMPLING = 16
"""From a Hub dataset, this many times the requested number of tokens is read."""
_SORTED_BY_TARGET = 8
"""Of so many groups together, which are then sorted by the lengths of their sources."""


class Pair(NamedTuple):
    """The tokens of both texts, special ones included."""

    source: Integers
    target: Integers

    @property
    def size(self) -> int:
        """Tokens of both."""
        return len(self.source) + len(self.target)


def pair_fields(source: Source, text: TextSource) -> tuple[str, str] | None:
    """The fields that hold pairs, as stated or as the first row has them; None where the source holds none."""
    if source.source_field is not None and source.target_field is not None:
        return source.source_field, source.target_field
    return _FIELDS if _has_fields(source, text, _FIELDS) else None


def has_inputs_alone(source: Source, text: TextSource) -> bool:
    """Whether the rows of a source hold inputs of an encoder-decoder without what is to be written for them."""
    return _has_fields(source, text, _FIELDS[:1]) and pair_fields(source, text) is None


def _has_fields(source: Source, text: TextSource, names: tuple[str, ...]) -> bool:
    """Whether the first row has these fields, and none that holds running text."""
    row: Any = {}
    with suppress(Exception):  # what is wrong with the text is explained when it is read
        row = next(text.pieces(Fields((), "row"))).text
    return isinstance(row, Mapping) and row.keys() >= set(names) and source.text_field not in row


def read_pairs(
    text: TextSource,
    fields: tuple[str, str],
    tokenizer: Any,
    *,
    tokens: int,
    length: int,
    seed: int,
) -> list[Pair]:
    """The pairs of a file, or the first ones of a Hub dataset, in an order that the seed decides.

    Args:
        text: what holds them.
        fields: of source and target.
        tokenizer: the model's.
        tokens: that are wanted.
        length: the most tokens of a text; longer ones are cut before their last token.
        seed: of the order.

    Raises:
        DataError: the tokenizer marks languages, or the text can't be read.
    """
    refuse_languages(tokenizer)
    encoder = PairEncoder(tokenizer, Fields(fields, "pair"))
    needed = _OVERSAMPLING * tokens if text.is_stream else None
    found = tokenize(text, encoder, default_cache(), needed=needed)
    texts = np.split(found.read(0, found.size), found.ends[:-1])
    cut = [shortened(each, length) for each in texts]
    count = len(cut) // 2
    order = [permuted(place, count, mix(seed, 6)) for place in range(count)]
    return [Pair(cut[2 * number], cut[2 * number + 1]) for number in order]


def pair_batches(
    folder: Path, config: Config, tokenizer: Any, pairs: Sequence[Pair], counts: Sequence[int]
) -> "tuple[list[list[dict[str, Tensor]]], int]":
    """Batches of three parts without overlap, and the number of pairs in the first.

    Args:
        folder: the checkpoint.
        config: its config.json.
        tokenizer: the model's.
        pairs: in random order.
        counts: tokens of both texts in the part that is fitted, the one that is held out, and the fresh one.

    Returns:
        For each part `input_ids` [b, Le], `decoder_input_ids` [b, Ld], the target shifted right by one, and `labels`
        [b, Ld] of each batch.
    """
    start = None if starts_with_last(config) else decoder_start(folder, config, tokenizer)
    parts = divided(pairs, [pair.size for pair in pairs], counts[0], counts[1])
    return [_batches(part, start) for part in parts], len(parts[0])


def _batches(pairs: Sequence[Pair], start: int | None) -> "list[dict[str, Tensor]]":
    if not pairs:
        return []
    by_target = sorted(pairs, key=lambda pair: len(pair.target))
    rows = max(1, BATCH_TOKENS * len(pairs) // sum(pair.size for pair in pairs))
    made = []
    for first in range(0, len(by_target), _SORTED_BY_TARGET * rows):
        alike = sorted(
            by_target[first : first + _SORTED_BY_TARGET * rows], key=lambda pair: len(pair.source)
        )
        made += [_batch(alike[row : row + rows], start) for row in range(0, len(alike), rows)]
    return made


def _batch(pairs: Sequence[Pair], start: int | None) -> "dict[str, Tensor]":
    """Pairs cut to the shortest source and the shortest target of them."""
    import torch

    read = min(len(pair.source) for pair in pairs)
    written = min(len(pair.target) for pair in pairs)
    sources = np.stack([shortened(pair.source, read) for pair in pairs])
    targets = np.stack([shortened(pair.target, written) for pair in pairs])
    decoder = np.roll(targets, 1, axis=1)
    if start is not None:
        decoder[:, 0] = start
    arrays = {"input_ids": sources, "decoder_input_ids": decoder, "labels": targets}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
