"""Batches for encoder-decoders out of texts of different lengths.

Shape legend: b rows, Le tokens of the longest encoder input, Ld tokens of the longest target.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gqa_convert.text.labels import IGNORED
from gqa_convert.text.order import Integers


class DecoderInput(NamedTuple):
    """How a decoder's input follows from its targets.

    Attributes:
        start: the token that it begins with.
        pad: the token that fills what is shorter than the longest of a batch.
        last_first: begin with the target's last token instead of `start`, as mBART does.
    """

    start: int
    pad: int
    last_first: bool = False


def collated(sources: Sequence[Integers], targets: Sequence[Integers], decoder: DecoderInput) -> dict[str, Integers]:
    """Texts padded at their ends to the longest of the batch.

    Args:
        sources: tokens for the encoder, [b] of different lengths.
        targets: tokens that the decoder is to write, [b] of different lengths, none of them empty.
        decoder: how its input is made of them.

    Returns:
        `input_ids` [b, Le]; `labels` [b, Ld], IGNORED where a target has ended; `decoder_input_ids` [b, Ld], the
        targets one later; and `attention_mask` [b, Le], unless no source is shorter than another.
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
