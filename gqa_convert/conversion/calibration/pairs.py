"""Pairs of texts as calibration: what an encoder reads, and what the decoder is to write.

Nothing in a batch is padding. Pairs of about the same lengths are put together instead, and cut to
the shortest of them, as sounds and their texts are (`speech`).
"""

from collections.abc import Sequence
from itertools import chain, zip_longest
from typing import NamedTuple

import numpy as np

from gqa_convert.conversion.options import BATCH_TOKENS
from gqa_convert.data.encoders import PairEncoder
from gqa_convert.data.files import Fields
from gqa_convert.data.model_tokenizer import (
    check_vocabulary,
    decoder_start,
    refuse_languages,
    starts_with_last,
    usable_tokenizer,
)
from gqa_convert.data.order import Integers, mix, shuffled
from gqa_convert.data.pairs import shortened
from gqa_convert.data.sources import PAIR_FIELDS, SELF, TextSource, first_row
from gqa_convert.data.token_files import tokenize
from gqa_convert.errors import DataError
from gqa_convert.families.loading import is_encoder_decoder, read_config

from .blocks import block_form
from .own_text import OwnWriter, with_spare
from .streams import (
    Batch,
    Batches,
    Calibration,
    Request,
    digest_of,
    divided,
    largest_token,
    shortage,
)
from .texts import OVERSAMPLING, OpenText

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


OpenPairs = tuple[OpenText, tuple[str, ...]]
"""A text that holds pairs, and the fields of their two sides."""


def find_pairs(
    request: Request, sources: Sequence[OpenText | None], writer: OwnWriter | None
) -> list[OpenPairs]:
    """The sources with the fields of their pairs; none of a decoder's, or of running text.

    Where rows hold inputs alone, the model writes the targets.

    Raises:
        DataError: some hold pairs and some do not, or the model can't write targets.
    """
    if not is_encoder_decoder(read_config(request.folder)):
        return []
    pairs: list[OpenPairs] = []
    others = [SELF] if None in sources else []
    wanted = request.fitted + request.held_out + (request.fitted if request.fresh else 0)
    for opened in filter(None, sources):
        fields = _fields_of(opened)
        if fields == PAIR_FIELDS[:1] and writer:
            written = writer.answer(opened.text, PAIR_FIELDS[0], with_spare(wanted / len(sources)))
            pairs.append((written, PAIR_FIELDS))
        elif len(fields) == len(PAIR_FIELDS):
            pairs.append((opened, fields))
        else:
            others.append(opened.text.label)
    if pairs and others:
        raise DataError(
            f"{pairs[0][0].text.label} holds pairs of source and target, and {others[0]} does not: "
            "calibrate on one kind of text"
        )
    return pairs


def _fields_of(opened: OpenText) -> tuple[str, ...]:
    """The fields of pairs, as stated or as the first row has them.

    One field of inputs alone; none of running text.
    """
    stated = opened.stated
    if stated.source_field is not None and stated.target_field is not None:
        return stated.source_field, stated.target_field
    row = first_row(opened.text)
    return () if stated.text_field in row else tuple(name for name in PAIR_FIELDS if name in row)


def draw_pairs(request: Request, sources: Sequence[OpenPairs]) -> Calibration:
    """Draw pairs from all sources in turn; of fewer than are asked for, all are used.

    Args:
        request: what is asked for; its length is the most tokens of a text, and longer ones are cut
            before their last token.
        sources: of pairs. Files are read whole, and Hub datasets from their beginning.

    Raises:
        OptionError: the length is out of range.
        DataError: the tokenizer marks languages, or a text or the tokenizer can't be read or does
            not fit the model.
    """
    config = read_config(request.folder)
    tokenizer = usable_tokenizer(request.folder)
    length = block_form(request, config, tokenizer).length
    refuse_languages(tokenizer)

    # Read the pairs, each source's in random order, and divide them.
    read = []
    for number, (opened, fields) in enumerate(sources):
        encoder = PairEncoder(tokenizer, Fields(fields, "pair"))
        found = _read(request, opened.text, encoder, length)
        read.append(shuffled(found, mix(mix(request.seed, number), 6)))
    turns = chain.from_iterable(zip_longest(*read))
    pairs = [pair for pair in turns if pair is not None]
    parts = divided(pairs, [pair.size for pair in pairs], request)

    # Make batches.
    start = None
    if not starts_with_last(config):
        start = decoder_start(request.folder, config, tokenizer)
    fitted, held_out, fresh = (_batches(part, start, request.seed) for part in parts)
    check_vocabulary(config, largest_token(fitted), request.folder)

    # Say what they are.
    label = " and ".join(opened.text.label for opened, _ in sources)
    used = sum(batch["input_ids"].numel() + batch["labels"].numel() for batch in fitted)
    settings = ["pairs", length, request.seed, BATCH_TOKENS, request.fitted]
    return Calibration(
        batches=fitted,
        tokens=used,
        digest=digest_of(settings, fitted),
        description=(
            f"{used} tokens of {label}: {len(parts[0])} pairs of source and target, "
            f"cut to the lengths of others, seed {request.seed}"
        ),
        label=label,
        warning=shortage(label, sum(pair.size for pair in pairs), request, "pairs"),
        held_out=held_out,
        fresh=fresh,
    )


def _read(request: Request, text: TextSource, encoder: PairEncoder, length: int) -> list[Pair]:
    """The pairs of a source, cut to a length."""
    needed = OVERSAMPLING * request.tokens if text.is_stream else None
    found = tokenize(text, encoder, needed=needed)
    cut = [shortened(found.document(number), length) for number in range(len(found.ends))]
    return list(map(Pair, cut[::2], cut[1::2]))


def _batches(pairs: Sequence[Pair], start: int | None, seed: int) -> Batches:
    """Batches of pairs of about one length.

    They come in random order, since the last ones are for validation.

    Args:
        pairs: in any order.
        start: the first token of the decoder's input; None for the last one of the target.
        seed: of the order.
    """
    if not pairs:
        return []
    by_target = sorted(pairs, key=lambda pair: len(pair.target))
    rows = max(1, BATCH_TOKENS * len(pairs) // sum(pair.size for pair in pairs))
    size = _SORTED_BY_TARGET * rows
    made: Batches = []
    for first in range(0, len(by_target), size):
        alike = sorted(by_target[first : first + size], key=lambda pair: len(pair.source))
        made += [_batch(alike[row : row + rows], start) for row in range(0, len(alike), rows)]
    return shuffled(made, mix(seed, 8))


def _batch(pairs: Sequence[Pair], start: int | None) -> Batch:
    """Pairs cut to the shortest source and the shortest target of them.

    Returns:
        `input_ids` [b, Le], `decoder_input_ids` [b, Ld], the target shifted right by one, and
        `labels` [b, Ld].
    """
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
