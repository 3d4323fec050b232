"""Fits the attention layers of a loaded model on calibration text, one after the other."""

from collections.abc import Sequence
from contextlib import ExitStack
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
from gqa_convert.conversion.fit.layer_walk import LayerWalk, running_device, weights_in_memory
from gqa_convert.conversion.fit.memory import KEPT_BYTES, hidden_size_of
from gqa_convert.conversion.fit.one_layer import FitOptions, OneLayer, judging_batches
from gqa_convert.conversion.fit.options import STEPS
from gqa_convert.conversion.fit.precision import precision_of
from gqa_convert.conversion.fit.progress import LayerReport, OnProgress
from gqa_convert.conversion.fit.source_layer import attention_of, read_source_layer
from gqa_convert.conversion.plan import Plan
from gqa_convert.merging.attention_heads import LayerLayout


class LayerFitting:
    """The layers of a plan, which are fitted in the order in which the model runs them.

    Each is read from the source, merged, and stored as the result will have it. The student then continues with the
    stored numbers. Hidden states that take more than a quarter of the free memory are kept in files.

    Args:
        plan: of method `fit`, or of `factor`, which ends with the closed form.
        store: where merged layers go; those that it holds already are not merged again.
        model: the loaded source.
        on_progress: called as the work goes on.
        steps: gradient steps of each layer.
    """

    def __init__(
        self, plan: Plan, store: LayerStore, model: Any, on_progress: OnProgress, *, steps: int = STEPS
    ) -> None:
        self._plan, self._store, self._model, self._steps = plan, store, model, steps
        self._layers = plan.merged_layers
        self._report = LayerReport(on_progress, len(self._layers))
        self._precision = precision_of(plan, running_device(model))

    def run(self, batches: Sequence[Batch]) -> float:
        """Fit every layer on batches of calibration text.

        Returns:
            KL(source || result) in nats per token, on calibration text that no gradient step and no regression has
            seen; where there is a single batch, on that one.

        Raises:
            NonFiniteError: a tensor holds NaN or Inf.
            UnsupportedFamilyError: the loaded module's parameters are not the checkpoint's tensors, or `LayerWalk` can't
                walk through the model.
        """
        numbers = {layer.module: number for number, (layer, _) in enumerate(self._layers)}
        with ExitStack() as stack:
            files = SourceFiles(self._plan.checkpoint, self._store.path, stack)
            scratch = None
            if is_large(self._plan, batches):
                scratch = Path(stack.enter_context(TemporaryDirectory(dir=self._store.path)))
            walk = LayerWalk(
                self._model,
                batches,
                list(numbers),
                self._plan.family.output,
                precision=self._precision,
                scratch=scratch,
                on_batch=partial(self._report.stage, "running source and student"),
            )
            source, student = walk.streams(2)
            for layer in walk.layers:
                with weights_in_memory(layer.module):
                    missing = [name for name in layer.attention if self._store.record(numbers[name]) is None]
                    streams = source.advance(layer, watch=missing)
                    merged: dict[str, dict[str, Tensor]] = {}
                    for name in layer.attention:
                        number = numbers[name]
                        if name in missing:
                            self._fit(number, student.attention(layer, name, merged, streams.pop(name)), files)
                        merged[name] = self._parameters(number, walk.module(name))
                        self._report.merged(self._store.record(number))
                    student.advance(layer, merged)
            total = count = 0.0
            for number in judging_batches(len(batches)):
                decodes = self._model.config.is_encoder_decoder
                predicted, wanted = student.logits(number), source.logits(number)
                missed, positions = summed_divergence(predicted, wanted, walk.batches[number], decodes=decodes)
                total += float(missed)
                count += float(positions)
            return total / max(1.0, count)

    def _fit(self, number: int, attention: CapturedAttention, files: SourceFiles) -> None:
        """Merge a layer, from the student's calls of its module, and store it."""
        layer, groups = self._layers[number]
        source = read_source_layer(attention_of(self._plan), layer, self._plan.limits_of(layer), files)
        options = FitOptions(
            groups=groups,
            method=self._plan.merge_method,
            steps=self._steps,
            seed=self._plan.seed,
            precision=self._precision,
        )
        merged, record = OneLayer(attention, source, options, self._report).fit()
        self._store.write(number, source.layout.merge_heads(merged, source.tensors, groups), record)

    def _parameters(self, number: int, module: Any) -> dict[str, Tensor]:
        """Those with which the source's module computes what a stored layer does."""
        layer, groups = self._layers[number]
        layout = LayerLayout(attention_of(self._plan), layer)
        repeated = repeated_parameters(layout, self._store.read(number), groups)
        return fitting_parameters(layer.module, module, repeated)


def is_large(plan: Plan, batches: Sequence[Batch]) -> bool:
    """Whether what is kept of the tokens of all batches would take more than a quarter of the free memory."""
    tokens = 0
    for batch in batches:
        tokens += max(tensor.numel() for tensor in batch.values() if not tensor.is_floating_point())
    free = available_memory(torch.device("cpu"))
    return free is not None and tokens * hidden_size_of(plan) * KEPT_BYTES > free / 4
