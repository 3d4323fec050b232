"""Fits the attention layers of a loaded model on calibration text, one after the other, and measures the result."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from gqa_convert.conversion.calibration.streams import Batch, tokens_of
from gqa_convert.conversion.layers.layer_store import SharedStore, layer_key
from gqa_convert.conversion.layers.layer_walk import (
    Installing,
    LayerWalk,
    Replacements,
    check_finite,
)
from gqa_convert.conversion.layers.merged_attention import MergedAttention
from gqa_convert.conversion.layers.model_loading import weights_in_memory
from gqa_convert.conversion.layers.one_layer import FitOptions, OneLayer
from gqa_convert.conversion.layers.source_layers import attention_of, open_layers
from gqa_convert.conversion.plan import Plan
from gqa_convert.conversion.progress import MERGING_LAYERS, FitProgress, OnProgress
from gqa_convert.losses.distillation import summed_divergence
from gqa_convert.merging.attention_heads import LayerLayout, Tensors
from gqa_convert.processes import total


def fit_layers(
    plan: Plan,
    store: SharedStore,
    model: Any,
    batches: Sequence[Batch],
    options: FitOptions,
    on_progress: OnProgress,
) -> None:
    """Fit the layers of a plan in the order in which the model runs them.

    Each is read from the source, merged, and stored as the result will have it. The student then continues with the
    stored numbers.

    Args:
        plan: of a method that reads text.
        store: where merged layers go; those that it holds already are not merged again.
        model: the loaded source.
        batches: of calibration text, those for validation last.
        options: of each layer.
        on_progress: called as the work goes on.

    Raises:
        NonFiniteError: a tensor holds NaN or Inf.
        UnsupportedFamilyError: the loaded module's parameters are not the checkpoint's tensors, or `LayerWalk` can't
            walk through the model.
    """
    numbers, finder = _layer_numbers(plan), attention_of(plan)
    done = 0

    def tell(stage: str) -> None:
        on_progress(FitProgress(MERGING_LAYERS, done, len(numbers), f"layer {done + 1}: {stage}"))

    with ExitStack() as stack:
        read_layer = stack.enter_context(open_layers(plan))
        walk = LayerWalk(model, batches, list(numbers), plan.family.output, options.precision)
        source, student = walk.streams(2)
        for layer in walk.layers:
            with weights_in_memory(layer.module):
                tell("running source and student")
                missing = [name for name in layer.attention if store.layer(numbers[name]) is None]
                streams = source.advance(layer, watch=missing)
                weights: Replacements = {}
                for name in layer.attention:
                    key, (merged, groups) = (
                        layer_key(numbers[name]),
                        plan.merged_layers[numbers[name]],
                    )
                    if name in missing:
                        opened = read_layer(merged)  # first, since it names a tensor that holds NaN
                        attention = student.attention(layer, name, weights, streams.pop(name))
                        tensors, record = OneLayer(attention, opened, groups, options, tell).fit()
                        store.write(key, tensors, asdict(record))
                    layout = LayerLayout(finder, merged)
                    weights = {
                        **weights,
                        name: _installing(layout, groups, store.read(key), walk.module(name)),
                    }
                    done += 1
                    on_progress(
                        FitProgress(
                            MERGING_LAYERS, done, len(numbers), layer=store.layer(numbers[name])
                        )
                    )
                student.advance(layer, weights)


def measure_divergence(
    plan: Plan, store: SharedStore, model: Any, batches: Sequence[Batch]
) -> float:
    """KL(source || result) in nats per token, in float32, with the tensors that the store holds, last stage included.

    Args:
        plan: whose layers are all stored.
        store: of the merged layers.
        model: the loaded source.
        batches: of text.

    Raises:
        NonFiniteError: the source or the result yields NaN or Inf.
    """
    numbers, finder = _layer_numbers(plan), attention_of(plan)
    walk = LayerWalk(model, batches, list(numbers), plan.family.output)
    source, student = walk.streams(2)
    for layer in walk.layers:
        with weights_in_memory(layer.module):
            source.advance(layer)
            weights = {}
            for name in layer.attention:
                merged, groups = plan.merged_layers[numbers[name]]
                tensors = store.read_result(numbers[name])
                weights[name] = _installing(
                    LayerLayout(finder, merged), groups, tensors, walk.module(name)
                )
            student.advance(layer, weights)
    own = 0.0
    for number in range(len(walk.batches)):
        own += float(summed_divergence(student.logits(number), source.logits(number)))
    divergence: float = total(own) / sum(tokens_of(batch).numel() for batch in batches)
    check_finite("the logits", torch.tensor(divergence))
    return divergence


def _layer_numbers(plan: Plan) -> dict[str, int]:
    """The place among `Plan.merged_layers` of each of them, by its module."""
    return {layer.module: number for number, (layer, _) in enumerate(plan.merged_layers)}


def _installing(layout: LayerLayout, groups: int, tensors: Tensors, module: Any) -> Installing:
    """What lets an attention module of the source run with the tensors of a merged layer."""
    merged = MergedAttention(layout, tensors, groups, module)
    return partial(merged.installed, merged.tensors)
