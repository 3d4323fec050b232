"""Runs the source and copies of it with merged layers over held-out text, layer by layer, and compares them.

Only one layer's merged weights are in memory at a time: each copy receives them as it enters the layer.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gqa_convert.checkpoint.devices import chosen_device
from gqa_convert.conversion.fit.attention_calls import MASSIVE, Batch, beginnings, hold_out
from gqa_convert.conversion.fit.layer_store import LayerStore
from gqa_convert.conversion.fit.layer_walk import Installing, LayerWalk
from gqa_convert.conversion.fit.memory import holds_halves
from gqa_convert.conversion.fit.merged_attention import check_holds
from gqa_convert.conversion.fit.model_loading import Precision, open_model, precision_of, running_device
from gqa_convert.conversion.fit.one_layer import VALIDATED, FitOptions
from gqa_convert.conversion.fit.options import CalibrationOptions, steps_per_layer
from gqa_convert.conversion.fit.source_layers import ReadLayer, open_layers
from gqa_convert.conversion.plan import Plan
from gqa_convert.data.labels import IGNORED
from gqa_convert.errors import DataError
from gqa_convert.losses.distillation import summed_divergence
from gqa_convert.measuring import StageProgress
from gqa_convert.measuring.evaluation.comparison import UNDEFINED, Mean, mean
from gqa_convert.measuring.evaluation.examples import Doubles
from gqa_convert.measuring.sensitivity.layer_merging import SHORT_STEPS, Merging, ShortFits, merge_by_closed_form
from gqa_convert.merging.methods import CALIBRATED_DEFAULT

Batches = Sequence[Batch]
Copy = Mapping[str, int]
"""The number of K/V heads of each merged layer, by the layer's module; other layers are the source's."""
MOST_COPIES = 64
"""Maximum number of copies whose activations are in memory together."""
_HELD_OUT = 5
"""One in this many tokens of text is held out."""


@dataclass(frozen=True)
class SensitivityInputs:
    """The loaded source, and the text that its copies are merged and measured on.

    Attributes:
        plan: of the source.
        model: the loaded source.
        read_layer: reads a layer.
        text: batches on which layers are merged.
        held_out: batches on which copies are measured.
        merge: how layers are merged.
        precision: of forward passes.
    """

    plan: Plan
    model: Any
    read_layer: ReadLayer
    text: Batches
    held_out: Batches
    merge: Merging
    precision: Precision


@dataclass(frozen=True)
class Score:
    """Of the source, or of a copy, over blocks of text; not defined where it yields NaN or Inf.

    Attributes:
        loss: nats per predicted token.
        kl: the divergence from the source, nats per token.
        sink: the length of the attention sink as a share of the source's, behind the layer where the source's is
            longest; None where the source has none.
    """

    loss: Mean
    kl: Mean
    sink: float | None


@contextmanager
def open_inputs(
    plan: Plan, batches: Batches, text: CalibrationOptions, store: LayerStore | None = None
) -> Iterator[SensitivityInputs]:
    """Load a plan's source, and hold out a part of the text.

    Args:
        plan: of the source.
        batches: of the text.
        text: its options.
        store: for the layers of short fits; without it layers are merged by the closed form.

    Raises:
        DataError: there is only one block of text.
    """
    before, held_out = hold_out(batches, _HELD_OUT)
    if not held_out:
        raise DataError(
            "the calibration text has one block and none left to hold out for the loss: name more text or more --calibration-tokens"
        )
    device = chosen_device(text.device)
    halves = store is not None and holds_halves(plan, device)
    model = open_model(plan.checkpoint.local_folder, device=device, halves=halves)
    merge: Merging = merge_by_closed_form
    precision: Precision = nullcontext
    if store is None:
        before = [*before, *beginnings(before, batches)]
    else:
        precision = precision_of(plan, running_device(model))
        steps = min(steps_per_layer(text), SHORT_STEPS)
        learned, validation = hold_out(before, VALIDATED)
        before = [*learned, *beginnings(learned, batches), *validation]
        options = FitOptions(
            method=CALIBRATED_DEFAULT,
            steps=steps,
            seed=text.seed,
            validation=min(1, len(validation)),
            precision=precision,
        )
        merge = ShortFits(store, options).merge
    with open_layers(plan) as read_layer:
        yield SensitivityInputs(plan, model, read_layer, before, held_out, merge, precision)


def tokens_of(batch: Batch) -> Tensor:
    """[B, L], the tokens that a model reads: those of what is said, where it hears."""
    return batch["input_ids"] if "input_ids" in batch else batch["decoder_input_ids"]


def predicted_tokens(batch: Batch) -> Tensor:
    """[B, L], the token that the logits of each position predict: the label, or else the next token of the input."""
    if "labels" in batch:
        return batch["labels"]
    return torch.nn.functional.pad(tokens_of(batch)[:, 1:], (0, 1), value=IGNORED)


def count_predicted(batches: Batches) -> int:
    """The number of predicted tokens."""
    return sum(int((predicted_tokens(batch) != IGNORED).sum()) for batch in batches)


def score_copies(
    inputs: SensitivityInputs, copies: Sequence[Copy], held_out: Batches, progress: StageProgress
) -> list[Score]:
    """The scores of the source, and then of each copy: these are merged layer by layer, then their logits are compared,
    those of one copy at a time.

    Args:
        inputs: the source and the text.
        copies: what to measure, at most `MOST_COPIES` in memory together.
        held_out: the batches to measure on.
        progress: called with the number of layers that the copies in memory have passed, and that of all.

    Raises:
        NonFiniteError: a layer of the source gets or gives NaN or Inf.
    """
    if len(copies) > MOST_COPIES:
        scores = score_copies(inputs, copies[:MOST_COPIES], held_out, progress)
        return scores + score_copies(inputs, copies[MOST_COPIES:], held_out, progress)[1:]
    layers = {layer.module: layer for layer in inputs.plan.layers}
    on_text, on_held_out = (
        LayerWalk(inputs.model, batches, list(layers), inputs.plan.family.output, inputs.precision)
        for batches in (inputs.text, held_out)
    )
    (text,) = on_text.streams(1)
    source, *students = on_held_out.streams(1 + len(copies))
    done = 0
    lengths: list[list[float]] = []
    """At the first position behind each layer of the last stack, of the source and the students, where there is a sink."""
    for layer in on_text.layers:
        merged: list[dict[str, Installing]] = [{} for _ in copies]
        for name in layer.attention:
            candidates = sorted({copy[name] for copy in copies if name in copy})
            if candidates:
                opened, attention = inputs.read_layer(layers[name]), text.attention(layer, name)
                check_holds(attention.module, opened)
                for groups, installed in inputs.merge(opened, attention, candidates):
                    for copy, own in zip(copies, merged, strict=True):
                        if copy.get(name) == groups:
                            own[name] = installed
            done += 1
            progress(done, len(layers))
        text.advance(layer)
        source.advance(layer)
        for student, own in zip(students, merged, strict=True):
            student.advance(layer, own)
        first, others = source.norms(layer.stack)
        if layer.stack == on_held_out.stacks[-1] and first > MASSIVE * others:
            lengths.append([first, *(student.norms(layer.stack)[0] for student in students)])
    longest = max(lengths, default=[])
    sinks: list[float | None] = [length / longest[0] for length in longest]
    sums: list[list[tuple[float, float]]] = [[] for _ in range(1 + len(copies))]
    predicted: list[int] = []
    tokens: list[int] = []
    for number, batch in enumerate(held_out):
        logits = source.logits(number)
        targets = predicted_tokens(batch).to(logits.device)
        predicted += (targets != IGNORED).sum(1).tolist()
        tokens += [targets.shape[1]] * len(targets)
        for blocks, stream in zip(sums, (source, *students), strict=True):
            blocks += _sums(stream.logits(number), logits, targets)
    scores = []
    for blocks, sink in zip(sums, sinks or [None] * len(sums), strict=True):
        loss, divergence = np.array(blocks).T
        scores.append(Score(_mean(loss, predicted), _mean(divergence, tokens), sink))
    return scores


def _sums(logits: Tensor, source: Tensor, targets: Tensor) -> Iterator[tuple[float, float]]:
    """The loss and the divergence from the source of each block: logits [B, L, vocabulary], targets [B, L]."""
    for ours, theirs, labels in zip(logits, source, targets, strict=True):
        losses = torch.nn.functional.cross_entropy(ours.float(), labels, reduction="none")
        divergence = summed_divergence(ours[None].float(), theirs[None].float())
        # rounding can make the divergence of an equal copy slightly negative
        yield float(losses.double().sum()), float(divergence.clamp(min=0))


def _mean(sums: Doubles, sizes: Sequence[int]) -> Mean:
    return mean(sums, np.array(sizes, np.float64)) if np.isfinite(sums).all() else UNDEFINED
