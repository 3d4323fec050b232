"""What is asked of calibration data, and what it gives: four streams of batches."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gqa_convert.errors import ConfigError
from gqa_convert.families.context_length import (
    HIDDEN_SIZE_KEYS,
    SPAN_LENGTH,
    block_length,
    stated_count,
)
from gqa_convert.families.loading import hears
from gqa_convert.families.records import record_of
from gqa_convert.runtime.json_objects import Config

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
Batch = Mapping[str, "Tensor"]
"""The inputs of the model: tensors by argument, with a row for each sequence."""
Batches = list[Batch]

VALIDATED = 8
"""One token in this many decides between candidates, and nothing is trained on it."""

LENGTH = 1024
"""The most tokens of a block by default. The same number of tokens in longer blocks comes from
fewer documents.
"""
_TOKENS = frozenset({"input_ids", "decoder_input_ids", "labels"})
_PER_HIDDEN = 8
_PER_SMALL_HIDDEN = 500
_SMALL_TOKENS = 24_576
"""The limit up to which small models get more tokens per hidden dimension."""
_PER_HIDDEN_OF_SPEECH = 12


@dataclass(frozen=True, slots=True)
class Request:
    """What calibration data is asked for.

    Attributes:
        folder: a local checkpoint with its tokenizer; its weights are not read for text.
        fitted: tokens that the layers are fitted on, validation included. Text is drawn in whole
            blocks: all counts are rounded up to them.
        held_out: tokens that decide nothing. How many does not change which others are drawn.
        fresh: tokens for training on what no layer has seen, as far as the data has them.
        seed: of what is drawn, of its order, and of what happens to it.
        length: tokens of a block, or of the encoder's input; None for `calibration_length_for`, or
            512 for span corruption.
        context: the position up to which blocks of a decoder are stretched; None for no skips.
    """

    folder: Path
    fitted: int
    held_out: int = 0
    fresh: int = 0
    seed: int = 0
    length: int | None = None
    context: int | None = None

    @property
    def tokens(self) -> int:
        """Of all streams together."""
        return self.fitted + self.held_out + self.fresh


@dataclass(frozen=True)
class Calibration:
    """Batches of calibration data.

    A batch holds keyword arguments of the model's forward pass, on the CPU:

    - of a decoder: `input_ids` [b, L], and `position_ids` and `attention_mask` where positions
      skip;
    - of an encoder-decoder: `input_ids` [b, L], `decoder_input_ids` and `labels` [b, Ld], the
      labels being the tokens to predict at each position (not shifted);
    - of a model that hears: `encoder_outputs` [b, positions, hidden_size] and `decoder_input_ids`.

    Its samples are equally long, and nothing in it is padding. A short text ends in a shorter
    block, which forms its own batch.

    Attributes:
        batches: those that the layers are fitted on, validation included.
        tokens: of text in `batches`.
        digest: SHA-256 over `batches` and the settings; equal digests mean equal batches.
        description: of the data, for reports.
        held_out: batches of other samples, which decide nothing; empty if the data has no more.
        label: what the data is, for reports on it.
        warning: for the user, about too little data; or None.
        mixed_in: what was mixed into the text, in words, or empty.
        left_out: what could not be mixed in, and why.
        fresh: batches of still other samples, for training on text that no batch before has.
    """

    batches: Batches
    tokens: int
    digest: str
    description: str
    held_out: Batches
    label: str = ""
    warning: str | None = None
    mixed_in: str = ""
    left_out: tuple[str, ...] = ()
    fresh: Batches = field(default_factory=list)

    @property
    def sequence_length(self) -> int:
        """The tokens of the longest sample in `batches`; of an encoder's input where it reads
        them.
        """
        name = "input_ids" if "input_ids" in self.batches[0] else "decoder_input_ids"
        return max(int(batch[name].shape[1]) for batch in self.batches)

    @cached_property
    def _divided(self) -> tuple[Batches, Batches]:
        return hold_out(self.batches, VALIDATED)

    @property
    def fitted(self) -> Batches:
        """Of `batches`, those from which the layers learn."""
        return self._divided[0]

    @property
    def validation(self) -> Batches:
        """Of `batches`, those by which strengths and steps are chosen; none of a single block."""
        return self._divided[1]


def tokens_of(batch: Batch) -> "Tensor":
    """[B, L], the tokens at whose positions the model predicts."""
    return batch["decoder_input_ids" if "decoder_input_ids" in batch else "input_ids"]


def rows_between(batch: Batch, first: int, last: int) -> Batch:
    """The rows of a batch from the first up to the last one, which is left out."""
    return {name: tensor[first:last] for name, tensor in batch.items()}


def hold_out(batches: Sequence[Batch], share: int) -> tuple[Batches, Batches]:
    """Divide batches by tokens, among whole blocks: the remainder of a text tells too little.

    Args:
        batches: the blocks of each are equally long.
        share: one token in this many is held out, at least a block.

    Returns:
        The batches without those blocks, and batches of these. Nothing is held out where no two
        blocks are whole, which means at least half as long as the longest.
    """
    shapes = [tokens_of(batch).shape for batch in batches]
    longest = max(length for _, length in shapes)
    wanted = sum(shape.numel() for shape in shapes) // share
    whole: Batches = []
    short: Batches = []
    for batch, (_, length) in zip(batches, shapes, strict=True):
        part = whole if 2 * length >= longest else short
        part.append(batch)

    # Hold out whole batches from the end, or else rows of the last one.
    held_out: Batches = []
    while whole and (count := tokens_of(whole[-1]).numel()) <= wanted:
        held_out.insert(0, whole.pop())
        wanted -= count
    if not held_out:
        rows, length = tokens_of(whole[-1]).shape
        left = rows - max(1, wanted // length)
        if left or len(whole) > 1:
            last = whole.pop()
            held_out.append(rows_between(last, left, rows))
            whole += [rows_between(last, 0, left)] if left else []
    return [*whole, *short], held_out


def divided(found: Sequence[T], lengths: Sequence[int], request: Request) -> list[Sequence[T]]:
    """Samples of different lengths for the layers, the next ones held out, and the rest, fresh.

    Where there are too few for the first two, one in nine is held out.

    Args:
        found: all samples.
        lengths: the tokens of each.
        request: how many tokens are asked for.
    """
    import numpy as np

    ends = np.cumsum(lengths)
    fitted = int(np.searchsorted(ends, request.fitted)) + 1
    held = max(fitted, int(np.searchsorted(ends, request.fitted + request.held_out))) + 1
    if not request.held_out or len(found) == 1:
        held = fitted
    elif held > len(found):
        fitted = len(found) - max(1, len(found) // 9)
        held = len(found)
    return [found[:fitted], found[fitted:held], found[held:]]


def largest_token(batches: Batches) -> int:
    """The largest token that a model of text reads or predicts."""
    found = []
    for batch in batches:
        found += [int(batch[name].max()) for name in _TOKENS & batch.keys()]
    return max(found)


def shortage(label: str, held: int, request: Request, more: str) -> str | None:
    """The warning of data that holds fewer tokens than the layers are to be fitted on; None of
    enough.
    """
    if held >= request.fitted:
        return None
    return (
        f"{label} has only {held} of the {request.fitted} calibration tokens requested: "
        f"all of them are used; more {more} may give a better merge"
    )


def digest_of(settings: Sequence[Any], batches: Iterable[Batch]) -> str:
    """SHA-256 over settings and the tensors of batches."""
    import torch

    digest = hashlib.sha256(json.dumps(settings).encode())
    for batch in batches:
        for name, tensor in sorted(batch.items()):
            digest.update(json.dumps([name, tensor.shape]).encode())
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def calibration_tokens_for(config: Config) -> int:
    """The default number of tokens: max(8 d, min(500 d, 24576)) for a hidden_size d, in whole
    blocks.

    That is 8 tokens per hidden dimension, and up to 500 below a hidden_size of 3072, where more
    text still helps and costs little. T5 and its relatives get twice as many, because their
    decoders see a fifth of the text. A model that hears gets 12, some 240 sentences for Whisper
    base: each comes with hundreds of positions of sound, on which the keys and values of
    cross-attention are fitted.

    Args:
        config: the content of config.json.

    Raises:
        ConfigError: it states no hidden_size.
    """
    if hears(config):
        return _PER_HIDDEN_OF_SPEECH * int(config["d_model"])
    hidden_size = stated_count(config, HIDDEN_SIZE_KEYS)
    if hidden_size is None:
        raise ConfigError(
            f"config.json states no hidden_size (none of {', '.join(HIDDEN_SIZE_KEYS)}): "
            "state how many calibration tokens to use"
        )
    tokens = max(_PER_HIDDEN * hidden_size, min(_PER_SMALL_HIDDEN * hidden_size, _SMALL_TOKENS))
    block = calibration_length_for(config)
    if record_of(config).is_t5:
        from gqa_convert.data.span_corruption import shape_for

        tokens, block = 2 * tokens, shape_for(SPAN_LENGTH).raw
    return -(-tokens // block) * block


def calibration_length_for(config: Config) -> int:
    """The default number of tokens of a block: the model's context, at most `LENGTH`."""
    return min(LENGTH, block_length(config))
