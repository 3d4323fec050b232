"""Blocks of calibration text: what form a model's have, which ones are drawn, and batches of
them.
"""

from collections.abc import Sequence
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gqa_convert.conversion.options import BATCH_TOKENS
from gqa_convert.data.model_tokenizer import beginning_of_text, decoder_start, has_sentinels
from gqa_convert.data.order import Integers, mix, shuffled
from gqa_convert.data.span_corruption import SpanCorruption
from gqa_convert.errors import OptionError
from gqa_convert.families.context_length import SPAN_LENGTH, block_length, stated_positions
from gqa_convert.families.loading import is_encoder_decoder
from gqa_convert.runtime.json_objects import Config

from .streams import Batches, Request, calibration_length_for
from .stretched_blocks import stretched

WORDS = {
    "causal": "tokens",
    "shifted": "tokens for encoder and decoder",
    "spans": "tokens after span corruption",
}
"""The kinds of blocks, and how reports call what is in them."""


class BlockForm(NamedTuple):
    """The kind and size of a model's blocks.

    Attributes:
        kind: causal, shifted (the decoder predicts the encoder's input) or spans (T5's span
            corruption).
        length: the input tokens of a block.
        raw: the tokens of text in a block.
        start: the first token of a decoder's input.
        corruption: of the kind spans.
        begin: with which the tokenizer begins every text, and each block begins; empty if it adds
            no such token.
    """

    kind: str
    length: int
    raw: int
    start: int = 0
    corruption: SpanCorruption | None = None
    begin: Sequence[int] = ()


class Text(NamedTuple):
    """A text of which blocks are drawn.

    Attributes:
        label: what it is: the user's name for it with the commit, or in words what is mixed in.
        tokens: [n].
        share: of all blocks.
        can_be_copied_into: whether spans may be copied over the end of a block.
        is_sampled: whether it is a sample in random order, of which more may be drawn another time:
            its blocks are then taken from its beginning.
    """

    label: str
    tokens: npt.NDArray[Any]
    share: float = 1.0
    can_be_copied_into: bool = True
    is_sampled: bool = False


class Block(NamedTuple):
    """A block: its place among all tokens, its tokens, and whether spans may be copied over its
    end.
    """

    start: int
    tokens: npt.NDArray[Any]
    can_be_copied_into: bool


def block_form(request: Request, config: Config, tokenizer: Any) -> BlockForm:
    """The form of a model's blocks.

    Raises:
        OptionError: the requested length is out of range.
        DataError: the tokenizer has too few sentinels for so long an input.
    """
    stated = request.length
    positions = stated_positions(config)
    if stated is not None and stated < 2:
        raise OptionError(
            f"the calibration sequence length is {stated} tokens, expected at least 2"
        )
    if stated is not None and positions is not None and stated > positions:
        raise OptionError(
            f"the calibration sequence length is {stated} tokens, "
            f"and the model has positions for {positions}: lower it"
        )

    length = stated or calibration_length_for(config)
    begin = beginning_of_text(tokenizer)
    if not is_encoder_decoder(config):
        return BlockForm("causal", length, length, begin=begin)
    start = decoder_start(request.folder, config, tokenizer)
    if not has_sentinels(tokenizer):
        return BlockForm("shifted", length, length, start, begin=begin)
    length = stated or min(SPAN_LENGTH, block_length(config))
    corruption = SpanCorruption(tokenizer, start, length)
    return BlockForm("spans", length, corruption.raw, start, corruption)


def draw_blocks(
    texts: Sequence[Text], length: int, counts: Sequence[int], seed: int
) -> list[list[Block]]:
    """Blocks from the texts by their shares, in parts without overlap, as far as a text has blocks
    left.

    Where there are fewer blocks than the first part takes, all texts are used up in blocks for it,
    and the last block of a text is shorter.

    Args:
        texts: the texts.
        length: the tokens of a block.
        counts: the number of blocks of each part.
        seed: determines their choice and order.
    """
    uses_all = sum(len(text.tokens) // length for text in texts) < counts[0]
    before = 0
    ranked = []
    for number, text in enumerate(texts):
        key = mix(seed, number) if number else seed
        for rank, start in enumerate(_starts(text, length, key, uses_all=uses_all)):
            tokens = text.tokens[start : start + length]
            block = Block(before + start, tokens, text.can_be_copied_into)
            ranked.append(((rank + 0.5) / text.share, block))
        before += len(text.tokens)
    blocks = [block for _, block in sorted(ranked, key=itemgetter(0))]

    ends = np.cumsum(counts).tolist()
    if uses_all:
        ends[0] = len(blocks)
    return [blocks[first:last] for first, last in pairwise([0, *ends])]


def _starts(text: Text, length: int, key: int, *, uses_all: bool) -> list[int]:
    """Where the blocks of a text begin, in the order in which they are drawn."""
    whole, rest = divmod(len(text.tokens), length)
    first = 0
    places = list(range(whole))
    if not text.is_sampled:
        first = 0 if uses_all else mix(key, 1) % (rest + 1)
        places = shuffled(places, mix(key, 2))
    if uses_all and rest > 1:
        places.append(whole)
    return [first + length * place for place in places]


def batches_of(blocks: Sequence[Block], form: BlockForm, context: int | None, seed: int) -> Batches:
    """Batches of blocks of one length, those of the longest blocks first.

    Args:
        blocks: their tokens.
        form: their kind and size.
        context: the position up to which causal blocks are stretched.
        seed: of spans and positions.
    """
    import torch

    rows = max(1, BATCH_TOKENS // form.length)
    made: Batches = []
    by_length = sorted(blocks, key=_length, reverse=True)
    for _, group in groupby(by_length, _length):
        alike = list(group)
        for first in range(0, len(alike), rows):
            part = alike[first : first + rows]
            ids = np.stack([_with_beginning(block.tokens, form.begin) for block in part])
            if form.corruption is not None:
                batch = form.corruption.batch(ids, [(mix(seed), block.start) for block in part])
            elif form.kind == "causal":
                copied = [block.can_be_copied_into for block in part]
                batch = stretched(ids, first, context, seed, copied)
            else:
                decoder = np.roll(ids, 1, axis=1)
                decoder[:, 0] = form.start
                batch = {"input_ids": ids, "decoder_input_ids": decoder, "labels": ids.copy()}
            tensors = {}
            for name, array in batch.items():
                tensors[name] = torch.from_numpy(np.ascontiguousarray(array))
            made.append(tensors)
    return made


def _length(block: Block) -> int:
    return len(block.tokens)


def _with_beginning(tokens: npt.NDArray[Any], begin: Sequence[int]) -> Integers:
    """The tokens of a block behind those that begin every text, for which its last ones make
    room.
    """
    ids = tokens.astype(np.int64)
    if ids[:1].tolist() != list(begin):
        ids[:] = [*begin, *ids][: len(ids)]
    return ids
