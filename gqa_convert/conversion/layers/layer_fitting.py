"""Fits the attention layers of a loaded model on calibration text, one after the other, and
measures the result.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from gqa_convert.conversion.calibration.streams import Batch, tokens_of
from gqa_convert.conversion.plan import Plan
from gqa_convert.conversion.progress import MERGING_LAYERS, FitProgress, OnProgress
from gqa_convert.losses.distillation import summed_divergence
from gqa_convert.processes import total

from .layer_store import SharedStore, layer_key
from .layer_walk import LayerWalk, Replacements, Stream, check_finite
from .merged_attention import MergedAttention
from .model_loading import walked_weights, weights_in_memory
from .one_layer import FitOptions, OneLayer
from .source_layers import layouts_of, open_layers


def fit_layers(
    plan: Plan,
    store: SharedStore,
    model: Any,
    batches: Sequence[Batch],
    options: FitOptions,
    on_progress: OnProgress,
) -> None:
    """Fit the layers of a plan in the order in which the model runs them.

    Each is read from the source, merged, and stored as the result will have it. The student then
    continues with the stored numbers.

    Args:
        plan: of a method that reads text.
        store: where merged layers go; those that it holds already are not merged again.
        model: the loaded source.
        batches: of calibration text, those for validation last.
        options: of each layer.
        on_progress: called as the work goes on.

    Raises:
        NonFiniteError: a tensor holds NaN or Inf.
        UnsupportedFamilyError: the loaded module's parameters are not the checkpoint's tensors, or
            `LayerWalk` can't walk through the model.
    """
    modules = _modules(plan)
    with walked_weights(model, modules):
        walk = LayerWalk(model, batches, modules, plan.family.output, options.precision)
        _pass_layers(plan, store, walk, options, on_progress)


def measure_divergence(
    plan: Plan, store: SharedStore, model: Any, batches: Sequence[Batch], *, on_host: bool = False
) -> float:
    """KL(source || result) in nats per token, in float32, with the tensors that the store holds,
    last stage included.

    Args:
        plan: whose layers are all stored.
        store: of the merged layers.
        model: the loaded source.
        batches: of text.
        on_host: see `FitOptions`.

    Raises:
        NonFiniteError: the source or the result yields NaN or Inf.
    """
    modules = _modules(plan)
    method = plan.merge_method
    options = FitOptions(method=method, steps=0, seed=0, validation=0, on_host=on_host)
    own = 0.0
    with walked_weights(model, modules):
        walk = LayerWalk(model, batches, modules, plan.family.output)
        source, student = _pass_layers(plan, store, walk, options, lambda progress: None)
        for number in range(len(walk.batches)):
            own += float(summed_divergence(student.logits(number), source.logits(number)))
    divergence: float = total(own) / sum(tokens_of(batch).numel() for batch in batches)
    check_finite("the logits", torch.tensor(divergence))
    return divergence


def _pass_layers(
    plan: Plan, store: SharedStore, walk: LayerWalk, options: FitOptions, on_progress: OnProgress
) -> list[Stream]:
    """Let the source and the student pass all layers, and fit those that the store lacks; returns
    both.
    """
    numbers = {name: number for number, name in enumerate(_modules(plan))}
    layouts = layouts_of(plan)
    done = 0

    def tell(stage: str) -> None:
        detail = f"layer {done + 1}: {stage}"
        on_progress(FitProgress(MERGING_LAYERS, done, len(numbers), detail))

    source, student = walk.streams(2, on_host=options.on_host)
    with open_layers(plan) as read_layer:
        for layer in walk.layers:
            with weights_in_memory(layer.module):
                # what each merged layer is to come near to
                tell("running source and student")
                missing = [name for name in layer.attention if store.layer(numbers[name]) is None]
                streams = source.advance(layer, watch=missing)
                # the attention modules in the order of their calls
                weights: Replacements = {}
                for name in layer.attention:
                    number = numbers[name]
                    layout, kv_heads = layouts[name], plan.layer_kv_heads[name]
                    if name in missing:
                        # read first, since it names a tensor that holds NaN
                        opened = read_layer(layout)
                        attention = student.attention(layer, name, weights, streams.pop(name))
                        tensors, record = OneLayer(attention, opened, kv_heads, options, tell).fit()
                        store.write(layer_key(number), tensors, asdict(record))
                    # the student goes on with what the result will have
                    stored = store.read_result(number)
                    merged = MergedAttention(layout, stored, kv_heads, walk.module(name))
                    weights = {**weights, name: merged.installed}
                    done += 1
                    found = store.layer(number)
                    on_progress(FitProgress(MERGING_LAYERS, done, len(numbers), layer=found))
                student.advance(layer, weights)
    return [source, student]


def _modules(plan: Plan) -> list[str]:
    """The attention modules of the merged layers, by their numbers."""
    return [layer.module for layer, _ in plan.merged_layers]
