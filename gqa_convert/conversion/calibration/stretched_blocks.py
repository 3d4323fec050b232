"""Blocks of text that ask more of attention than their length does.

Calibration text comes in blocks much shorter than the context of most models. What attention does
over longer distances does not show in them, and hardly what it does to find an earlier passage
again. So every second block is stretched:

- Its last quarter consists of spans copied from the rest, which only a model that finds them again
  predicts.
- Its positions skip once, as in PoSE (Zhu et al. 2023, section 3.2), so that distances reach over
  the whole context at the cost of a short block. The source reads the same positions, so that there
  is always something to compare with.
"""

import random
from collections.abc import Sequence

import numpy as np

from gqa_convert.data.order import Integers, mix

SPAN = 32
"""Tokens of a copied span."""
SHORTEST = 16 * SPAN
"""Of blocks that are stretched."""
_EVERY = 2


def stretched(
    ids: Integers, first: int, context: int | None, seed: int, copied: Sequence[bool]
) -> dict[str, Integers]:
    """A batch of blocks, of which every second one is stretched if the context is longer, and the
    block long enough to copy from.

    Args:
        ids: tokens [b, L].
        first: the number of the first block among those of its stream and length; odd ones are
            stretched.
        context: the position up to which they skip; None leaves all blocks as they are.
        seed: of the spans and the positions.
        copied: for each block, whether spans are copied over its end.

    Returns:
        The arguments of the model's forward pass: `input_ids` [b, L], and where blocks are
        stretched also `position_ids` [b, L] and `attention_mask` [b, L] of ones, without which
        transformers takes a skip for the beginning of another text.
    """
    length = ids.shape[1]
    if context is None or not SHORTEST <= length < context:
        return {"input_ids": ids}
    ids, positions = ids.copy(), np.tile(np.arange(length), (len(ids), 1))
    for row in range(len(ids)):
        if (first + row) % _EVERY:
            chance = random.Random(mix(seed, first + row))
            if copied[row]:
                _copy_spans(ids[row], chance)
            place = chance.randrange(length // 8, length - length // 8)
            most = context - length
            least = min(most, length // 8)
            positions[row, place:] += round(least * (most / least) ** chance.random())
    return {"input_ids": ids, "position_ids": positions, "attention_mask": np.ones_like(ids)}


def _copy_spans(tokens: Integers, chance: random.Random) -> None:
    begin = len(tokens) - len(tokens) // 4
    for place in range(begin, len(tokens) - SPAN + 1, SPAN):
        start = chance.randrange(begin - SPAN)
        tokens[place : place + SPAN] = tokens[start : start + SPAN]
