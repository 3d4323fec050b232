"""Collates texts of different lengths into batches for encoder-decoders.

Shape legend: b rows, Le tokens of the longest encoder input, Ld tokens of the longest target.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gqa_convert.text.labels import IGNORED
from gqa_convert.text.order import Integers


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
    longest, longest_target = (max(len(text) for text in side) for side in (sources, targets))
    inputs, mask = np.full((len(sources), longest), decoder.pad, np.int64), np.zeros((len(sources), longest), np.int64)
    labels = np.full((len(targets), longest_target), IGNORED, np.int64)
    shifted = np.full((len(targets), longest_target), decoder.pad, np.int64)
    for row, (source, target) in enumerate(zip(sources, targets, strict=True)):
        inputs[row, : len(source)], mask[row, : len(source)] = source, 1
        labels[row, : len(target)] = target
        shifted[row, 0] = target[-1] if decoder.last_first else decoder.start
        shifted[row, 1 : len(target)] = target[:-1]
    batch = {"input_ids": inputs, "labels": labels, "decoder_input_ids": shifted}
    return batch if mask.all() else batch | {"attention_mask": mask}
