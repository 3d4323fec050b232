"""Runs the source and copies of it with merged layers over held-out text, layer by layer, and
compares them.

Layers are merged by the closed form, or by a short fit. Only one layer's merged weights are in
memory at a time: each copy receives them as it enters the layer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from torch.nn.functional import cross_entropy, pad

from gqa_convert.conversion.calibration.streams import VALIDATED, Batch, hold_out, tokens_of
from gqa_convert.conversion.layers.attention_calls import MASSIVE, CapturedAttention, beginnings
from gqa_convert.conversion.layers.layer_store import LayerStore, layer_key
from gqa_convert.conversion.layers.layer_walk import Installing, LayerWalk, Stream
from gqa_convert.conversion.layers.merged_attention import MergedAttention, check_holds
from gqa_convert.conversion.layers.model_loading import (
    Precision,
    open_model,
    precision_of,
    running_device,
)
from gqa_convert.conversion.layers.one_layer import FitOptions, OneLayer
from gqa_convert.conversion.layers.source_layers import SourceLayer, layouts_of, open_layers
from gqa_convert.conversion.layers.statistics import heads_on, moments_of
from gqa_convert.conversion.options import CalibrationOptions, steps_per_layer
from gqa_convert.conversion.plan import Plan
from gqa_convert.conversion.resources import holds_halves, is_reduced
from gqa_convert.data.sampler import IGNORED
from gqa_convert.errors import DataError
from gqa_convert.families.loading import read_kind
from gqa_convert.losses.distillation import summed_divergence
from gqa_convert.measuring import StageProgress
from gqa_convert.measuring.evaluation.scoring import Mean, mean
from gqa_convert.merging.attention_heads import Tensors
from gqa_convert.merging.merge_layer import merge_layer
from gqa_convert.merging.methods import CALIBRATED_DEFAULT
from gqa_convert.runtime.machine import chosen_device

Merging = Callable[[SourceLayer, CapturedAttention, Sequence[int]], Iterator[Tensors]]
"""Merges a layer of the source into each number of K/V heads: called with the layer, its module in
the source with its calls on the text, and the numbers, it yields the tensors for each number.
"""
Batches = Sequence[Batch]
Blocks = list[tuple[float, int, float, int]]
"""Of each block of text: the sum of losses, of how many predicted tokens, the sum of divergences
from the source, and of how many tokens.
"""
Copy = Mapping[str, int]
"""The number of K/V heads of each merged layer, by the layer's module; other layers are the
source's.
"""
MOST_COPIES = 64
"""Maximum number of copies whose activations are in memory together."""
SHORT_STEPS = 20
"""Gradient steps of a short fit."""
_SHORT_BATCHES = 6
"""Batches of text of a short fit, of which one is held out from the gradient steps. Twelve leave 4%
less (benchmarks/log.md).
"""
_HELD_OUT = 5
"""One in this many tokens of text is held out."""


class SensitivityInputs(NamedTuple):
    """The loaded source, and the text that its copies are merged and measured on.

    Attributes:
        plan: of the source.
        model: the loaded source.
        text: batches on which layers are merged.
        held_out: batches on which copies are measured.
        merge: how layers are merged.
        precision: of forward passes.
    """

    plan: Plan
    model: Any
    text: Batches
    held_out: Batches
    merge: Merging
    precision: Precision


class Score(NamedTuple):
    """Of the source, or of a copy, over blocks of text; not defined where it yields NaN or Inf.

    Attributes:
        loss: nats per predicted token.
        kl: the divergence from the source, nats per token.
        predicted: the number of predicted tokens.
        sink: the length of the attention sink as a share of the source's, behind the layer where
            the source's is longest; None where the source has none.
    """

    loss: Mean
    kl: Mean
    predicted: int
    sink: float | None


def load_inputs(
    plan: Plan, batches: Batches, text: CalibrationOptions, store: LayerStore | None = None
) -> SensitivityInputs:
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
        data = read_kind(plan.checkpoint.config)
        raise DataError(
            f"there is one block of calibration {data} and none left to hold out for the loss: "
            f"name more {data} or more --calibration-tokens"
        )
    device = chosen_device(text.device)
    halves = store is not None and holds_halves(plan, device)
    model = open_model(plan.checkpoint.local_folder, device=device, halves=halves)
    if store is None:
        merged_on = [*before, *beginnings(before, batches)]
        return SensitivityInputs(
            plan, model, merged_on, held_out, merge_by_closed_form, nullcontext
        )
    running = running_device(model)
    precision = precision_of(is_reduced(plan, running), running)
    before, validation = hold_out(before, VALIDATED)
    merged_on = [*before, *beginnings(before, batches), *validation]
    if len(merged_on) > _SHORT_BATCHES:  # the last one is for validation
        merged_on = [*merged_on[: _SHORT_BATCHES - 1], merged_on[-1]]
    options = FitOptions(
        method=CALIBRATED_DEFAULT,
        steps=min(steps_per_layer(text), SHORT_STEPS),
        seed=text.seed,
        validation=min(1, len(validation)),
        precision=precision,
    )
    merge = partial(merge_by_short_fits, store, options)
    return SensitivityInputs(plan, model, merged_on, held_out, merge, precision)


def merge_by_closed_form(
    layer: SourceLayer, attention: CapturedAttention, candidates: Sequence[int]
) -> Iterator[Tensors]:
    """Merge as method `factor` does; see `Merging`."""
    check_holds(attention.module, layer)
    moments = moments_of(attention.calls)
    heads = heads_on(layer, attention.calls[0].hidden.device)
    wide = {name: array.astype(np.float32) for name, array in layer.tensors.items()}
    for kv_heads in candidates:
        merged = merge_layer(heads, kv_heads, layer.limits, moments)
        yield layer.layout.merge_heads(merged, wide, kv_heads)


def merge_by_short_fits(
    store: LayerStore,
    options: FitOptions,
    layer: SourceLayer,
    attention: CapturedAttention,
    candidates: Sequence[int],
) -> Iterator[Tensors]:
    """Merge as `fit` does, in fewer steps; see `Merging`. Each layer is fitted once for each number
    of K/V heads, and kept in the store.
    """
    for kv_heads in candidates:
        key = f"{layer_key(layer.layout.layer.number)}-{kv_heads}"
        if store.record(key) is None:
            tensors, record = OneLayer(attention, layer, kv_heads, options).fit()
            store.write(key, tensors, asdict(record))
        yield store.read(key)


def score_copies(
    inputs: SensitivityInputs, copies: Sequence[Copy], held_out: Batches, progress: StageProgress
) -> list[Score]:
    """The scores of the source, and then of each copy: these are merged layer by layer, then their
    logits are compared, those of one copy at a time.

    Args:
        inputs: the source and the text.
        copies: what to measure, at most `MOST_COPIES` in memory together.
        held_out: the batches to measure on.
        progress: called with the number of layers that the copies in memory have passed, and that
            of all.

    Raises:
        NonFiniteError: a layer of the source gets or gives NaN or Inf.
    """
    if len(copies) > MOST_COPIES:
        scores = score_copies(inputs, copies[:MOST_COPIES], held_out, progress)
        return scores + score_copies(inputs, copies[MOST_COPIES:], held_out, progress)[1:]
    copies = [{}, *copies]
    layouts = layouts_of(inputs.plan)
    described = [*layouts], inputs.plan.family.output, inputs.precision
    on_text = LayerWalk(inputs.model, inputs.text, *described)
    on_held_out = LayerWalk(inputs.model, held_out, *described)
    (text,) = on_text.streams(1)
    streams = on_held_out.streams(len(copies))
    # at the first position behind each layer of the last stack, of the source and its copies, where
    # there is a sink
    lengths: list[list[float]] = []
    with open_layers(inputs.plan) as read_layer:
        for number, layer in enumerate(on_text.layers, 1):
            # merge the layer into every number that a copy has
            merged: dict[tuple[str, int], Installing] = {}
            for name in layer.attention:
                candidates = sorted({copy[name] for copy in copies if name in copy})
                if candidates:
                    opened = read_layer(layouts[name])
                    attention = text.attention(layer, name)
                    found = inputs.merge(opened, attention, candidates)
                    for kv_heads, tensors in zip(candidates, found, strict=True):
                        module = MergedAttention(opened.layout, tensors, kv_heads, attention.module)
                        merged[name, kv_heads] = module.installed

            # the source and its copies pass it
            text.advance(layer)
            for stream, copy in zip(streams, copies, strict=True):
                own = {name: merged[name, copy[name]] for name in layer.attention if name in copy}
                stream.advance(layer, own)
            first, others = streams[0].norms(layer.stack)
            if layer.stack == on_held_out.stacks[-1] and first > MASSIVE * others:
                lengths.append([stream.norms(layer.stack)[0] for stream in streams])
            progress(number, len(on_text.layers))

    # behind the layer where the source's sink is longest
    longest = max(lengths, default=[])
    scores = []
    for number, sums in enumerate(_sums_of_blocks(streams, held_out)):
        loss, predicted, divergence, tokens = np.array(sums).T
        sink = longest[number] / longest[0] if longest else None
        kl = mean(divergence, tokens)
        scores.append(Score(mean(loss, predicted), kl, int(predicted.sum()), sink))
    return scores


def _sums_of_blocks(streams: Sequence[Stream], held_out: Batches) -> list[Blocks]:
    """The sums over each block of text, of each stream; the first stream is the source."""
    found: list[Blocks] = [[] for _ in streams]
    for number, batch in enumerate(held_out):
        source = streams[0].logits(number)
        targets = batch.get("labels")
        if targets is None:
            targets = pad(tokens_of(batch)[:, 1:], (0, 1), value=IGNORED)
        targets = targets.to(source.device)
        for sums, stream in zip(found, streams, strict=True):
            for ours, theirs, labels in zip(stream.logits(number), source, targets, strict=True):
                losses = cross_entropy(ours.float(), labels, reduction="none").double()
                # rounding can make the divergence of an equal copy slightly negative
                kl = summed_divergence(ours, theirs).clamp(min=0)
                predicted = int((labels != IGNORED).sum())
                sums.append((float(losses.sum()), predicted, float(kl), len(labels)))
    return found
