"""Fits the attention layers of a loaded model on calibration text, one after the other."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from gqa_convert.checkpoint.machine import available_memory
from gqa_convert.checkpoint.source_files import SourceFiles
from gqa_convert.conversion.fit.attention_calls import Batch, CapturedAttention, fitting_parameters
from gqa_convert.conversion.fit.divergence import summed_divergence
from gqa_convert.conversion.fit.head_parameters import repeated_parameters
from gqa_convert.conversion.fit.layer_store import LayerStore
from gqa_convert.conversion.fit.layer_walk import LayerWalk, Stream, running_device, weights_in_memory
from gqa_convert.conversion.fit.memory import KEPT_BYTES, hidden_size_of
from gqa_convert.conversion.fit.one_layer import FitOptions, OneLayer, judging_batches
from gqa_convert.conversion.fit.options import STEPS
from gqa_convert.conversion.fit.precision import Precision, precision_of
from gqa_convert.conversion.fit.progress import MERGING_LAYERS, FitProgress, OnProgress, OnStage, Stage
from gqa_convert.conversion.fit.source_layer import attention_of, read_source_layer
from gqa_convert.conversion.plan import Plan
from gqa_convert.merging.attention_heads import LayerLayout


def fit_layers(
    plan: Plan,
    store: LayerStore,
    model: Any,
    batches: Sequence[Batch],
    on_progress: OnProgress,
    *,
    steps: int = STEPS,
) -> float:
    """Merge every layer on calibration text, in the order in which the model runs them.

    Each layer is read from the source, merged, and stored as the result will have it. The student then continues with
    the stored numbers. Hidden states that take more than a quarter of the free memory are kept in files.

    Args:
        plan: of method `fit`, or of `factor`, which ends with the closed form.
        store: where merged layers go; those that it holds already are not merged again.
        model: the loaded source.
        batches: of calibration text.
        on_progress: called as the work goes on.
        steps: gradient steps of each layer.

    Returns:
        KL(source || result) in nats per token, on calibration text that no gradient step and no regression has seen;
        where there is a single batch, on that one.

    Raises:
        NonFiniteError: a tensor holds NaN or Inf.
        UnsupportedFamilyError: the loaded module's parameters are not the checkpoint's tensors, or `LayerWalk` can't
            walk through the model.
    """
    numbers = {layer.module: number for number, (layer, _) in enumerate(plan.merged_layers)}
    precision = precision_of(plan, running_device(model))
    done = 0  # layers

    def on_stage(stage: Stage, step: int, steps: int) -> None:
        counted = f" {step:,} of {steps:,}" if steps else ""
        on_progress(FitProgress(MERGING_LAYERS, done, len(numbers), f"layer {done + 1}: {stage}{counted}"))

    with ExitStack() as stack:
        scratch = None
        if is_large(plan, batches):
            scratch = Path(stack.enter_context(TemporaryDirectory(dir=store.path)))
        files = SourceFiles(plan.checkpoint, store.path, stack)
        merged_layers = _MergedLayers(plan, store, files, steps, precision, on_stage)
        on_batch = partial(on_stage, Stage.FORWARD)
        projection = plan.family.output
        walk = LayerWalk(
            model, batches, list(numbers), projection, precision=precision, scratch=scratch, on_batch=on_batch
        )
        source, student = walk.streams(2)
        for layer in walk.layers:
            with weights_in_memory(model.get_submodule(layer.name)):
                missing = [name for name in layer.attention if store.record(numbers[name]) is None]
                streams = source.advance(layer, watch=missing)
                committed: dict[str, dict[str, Tensor]] = {}
                for name in layer.attention:
                    if name in missing:
                        attention = student.attention(layer, name, committed, streams.pop(name))
                        merged_layers.fit(numbers[name], attention)
                        del attention
                    committed[name] = merged_layers.parameters(numbers[name], walk.module(name))
                    done += 1
                    record = store.record(numbers[name])
                    on_progress(FitProgress(MERGING_LAYERS, done, len(numbers), layer=record))
                student.advance(layer, committed)
        return _divergence(walk, source, student)


@dataclass(frozen=True, slots=True)
class _MergedLayers:
    """The layers of the result, by their numbers in the plan."""

    plan: Plan
    store: LayerStore
    files: SourceFiles
    steps: int
    precision: Precision
    on_stage: OnStage

    def fit(self, number: int, attention: CapturedAttention) -> None:
        """Merge a layer, from the student's calls of its module, and store it."""
        layer, groups = self.plan.merged_layers[number]
        source = read_source_layer(attention_of(self.plan), layer, self.plan.limits_of(layer), self.files)
        options = FitOptions(
            groups=groups,
            method=self.plan.merge_method,
            steps=self.steps,
            seed=self.plan.seed,
            precision=self.precision,
        )
        merged, record = OneLayer(attention, source, options, self.on_stage).fit()
        self.store.write(number, source.layout.merge_heads(merged, source.tensors, groups), record)

    def parameters(self, number: int, module: Any) -> dict[str, Tensor]:
        """Those with which the source's module computes what a stored layer does."""
        layer, groups = self.plan.merged_layers[number]
        layout = LayerLayout(attention_of(self.plan), layer)
        return fitting_parameters(layer.module, module, repeated_parameters(layout, self.store.read(number), groups))


def _divergence(walk: LayerWalk, source: Stream, student: Stream) -> float:
    """KL(source || student) in nats per token on the batches that nothing was trained on."""
    total = count = 0.0
    for number in judging_batches(len(walk.batches)):
        predicted, wanted = student.logits(number), source.logits(number)
        decodes = walk.model.config.is_encoder_decoder
        missed, positions = summed_divergence(predicted, wanted, walk.batches[number], decodes=decodes)
        total += float(missed)
        count += float(positions)
    return total / max(1.0, count)


def is_large(plan: Plan, batches: Sequence[Batch]) -> bool:
    """Whether what is kept of the tokens of all batches would take more than a quarter of the free memory."""
    tokens = 0
    for batch in batches:
        tokens += max(tensor.numel() for tensor in batch.values() if not tensor.is_floating_point())
    free = available_memory(torch.device("cpu"))
    return free is not None and tokens * hidden_size_of(plan) * KEPT_BYTES > free / 4
