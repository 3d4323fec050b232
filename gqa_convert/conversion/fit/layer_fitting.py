"""Fits the attention layers of a loaded model on calibration text, one after the other."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any

from gqa_convert.conversion.fit.attention_calls import Batch, tokens_of
from gqa_convert.conversion.fit.layer_store import LayerStore, layer_key
from gqa_convert.conversion.fit.layer_walk import LayerWalk, Replacements
from gqa_convert.conversion.fit.merged_attention import MergedAttention
from gqa_convert.conversion.fit.model_loading import weights_in_memory
from gqa_convert.conversion.fit.one_layer import FitOptions, OneLayer, validation_batches
from gqa_convert.conversion.fit.progress import MERGING_LAYERS, FitProgress, OnProgress
from gqa_convert.conversion.fit.source_layers import attention_of, open_layers
from gqa_convert.conversion.plan import Plan
from gqa_convert.losses.distillation import summed_divergence
from gqa_convert.merging.attention_heads import LayerLayout


def fit_layers(
    plan: Plan, store: LayerStore, model: Any, batches: Sequence[Batch], options: FitOptions, on_progress: OnProgress
) -> float:
    """Fit the layers of a plan in the order in which the model runs them.

    Each is read from the source, merged, and stored as the result will have it. The student then continues with the
    stored numbers.

    Args:
        plan: of a method that reads text.
        store: where merged layers go; those that it holds already are not merged again.
        model: the loaded source.
        batches: of calibration text.
        options: of each layer.
        on_progress: called as the work goes on.

    Returns:
        KL(source || result) in nats per token, on calibration text that no gradient step and no regression has seen;
        where there is a single batch, on that one.

    Raises:
        NonFiniteError: a tensor holds NaN or Inf.
        UnsupportedFamilyError: the loaded module's parameters are not the checkpoint's tensors, or `LayerWalk` can't
            walk through the model.
    """
    numbers = {layer.module: number for number, (layer, _) in enumerate(plan.merged_layers)}
    finder, done = attention_of(plan), 0

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
                    key, (merged, groups) = layer_key(numbers[name]), plan.merged_layers[numbers[name]]
                    if name in missing:
                        attention = student.attention(layer, name, weights, streams.pop(name))
                        tensors, record = OneLayer(attention, read_layer(merged), groups, options, tell).fit()
                        store.write(key, tensors, asdict(record))
                    module = MergedAttention(LayerLayout(finder, merged), store.read(key), groups, walk.module(name))
                    weights = {**weights, name: partial(module.installed, module.tensors)}
                    done += 1
                    on_progress(FitProgress(MERGING_LAYERS, done, len(numbers), layer=store.layer(numbers[name])))
                student.advance(layer, weights)
        divergence, count = 0.0, 0
        for number in validation_batches(len(batches)):
            divergence += float(summed_divergence(student.logits(number), source.logits(number)))
            count += tokens_of(batches[number]).numel()
    return divergence / count
