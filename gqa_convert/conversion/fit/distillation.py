"""The last stage of `fit`: trains the merged projections of all layers together to predict what the source predicts
(Hinton et al. 2015, section 2).

The source and the student are one loaded model, run with the weights of either, so that the student costs no more than
its attention. The stage needs the whole model in memory; larger models skip it.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gqa_convert.checkpoint.heap import kept_heap
from gqa_convert.checkpoint.provenance import Divergence
from gqa_convert.conversion.fit.attention_calls import Batch, replaced
from gqa_convert.conversion.fit.divergence import positions, summed_divergence
from gqa_convert.conversion.fit.head_parameters import Assembly, Parts, as_heads, as_parts
from gqa_convert.conversion.fit.layer_store import LayerStore
from gqa_convert.conversion.fit.layer_walk import parts_of
from gqa_convert.conversion.fit.module_names import find_modules
from gqa_convert.conversion.fit.optimizer import RelativeAdam, batch_order
from gqa_convert.conversion.fit.precision import Precision
from gqa_convert.conversion.fit.progress import ALL_TOGETHER, FitProgress, OnProgress
from gqa_convert.conversion.fit.residual_stream import on_leaving
from gqa_convert.conversion.fit.source_layer import attention_of
from gqa_convert.conversion.fit.training_attention import TrainingAttention
from gqa_convert.conversion.plan import Plan
from gqa_convert.merging.attention_heads import LayerLayout, Tensors

RATE = 0.005
"""Of `RelativeAdam`."""
WORTHWHILE = 0.02
"""Nats per token: where the divergence after the layers is smaller, the stage gains too little for its time."""
_MEASURED = 4
"""In so many parts of the stage the divergence is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationOptions:
    """How all layers are trained together."""

    steps: int
    """Batches to see."""
    seed: int
    """Of their order."""
    least: float = 0.0
    """The divergence, in nats per token, below which nothing is done."""
    precision: Precision = nullcontext
    """Of the forward passes of a step."""


class Student:
    """A loaded source in which the merged heads of all layers can stand in place of its own.

    Args:
        plan: of the conversion.
        store: with all its layers.
        model: the loaded source, all in memory; it is unchanged outside `installed`.
    """

    def __init__(self, plan: Plan, store: LayerStore, model: Any) -> None:
        self.model, self._plan = model, plan
        self.decodes = model.config.is_encoder_decoder
        finder = attention_of(plan)
        found = find_modules(model, [layer.module for layer, _ in plan.merged_layers])
        self._modules = [model.get_submodule(name) for name in found.values()]
        self._layouts = [LayerLayout(finder, layer) for layer, _ in plan.merged_layers]
        self._repeated: list[Tensors] = []
        """The tensors of each layer with K/V heads repeated."""
        self._assemblies = []
        self.start: list[dict[str, Tensor]] = []
        """The parts of each layer, as the store has them."""
        for number, (layout, (_, groups)) in enumerate(zip(self._layouts, plan.merged_layers, strict=True)):
            tensors = store.read(number)
            repeated = layout.repeated(tensors, groups)
            self._repeated.append(repeated)
            self._assemblies.append(Assembly(layout, repeated, groups, model.device))
            self.start.append(as_parts(layout.split_heads(tensors, groups), model.device))

    @contextmanager
    def installed(self, parts: Sequence[Parts]) -> Iterator[None]:
        """A context in which the model runs with these parts."""
        with ExitStack() as stack:
            for module, assembly, own in zip(self._modules, self._assemblies, parts, strict=True):
                stack.enter_context(replaced(module, assembly(own)))
            yield

    def logits(self, batch: Batch) -> Tensor:
        """[B, L, vocabulary], of the source, or of the student inside `installed`."""
        moved = {name: tensor.to(self.model.device) for name, tensor in batch.items()}
        logits: Tensor = self.model(**moved, use_cache=False).logits
        return logits

    def divergence(self, batches: Sequence[Batch], parts: Sequence[Parts]) -> float:
        """KL(source || student), in nats per token."""
        total = count = 0.0
        with torch.no_grad():
            for batch in batches:
                wanted = self.logits(batch)
                with self.installed(parts):
                    summed, counted = summed_divergence(self.logits(batch), wanted, batch, decodes=self.decodes)
                total += float(summed.double())
                count += float(counted)
        return total / count

    def errors(self, batch: Batch, parts: Sequence[Parts]) -> dict[str, float]:
        """How far the output of each layer's attention is from the source's on a batch, relative to it, by its name in
        `gqa_conversion.json`.
        """
        seen: list[list[Tensor]] = [[] for _ in self._modules]
        with torch.no_grad(), ExitStack() as stack:
            for module, outputs in zip(self._modules, seen, strict=True):
                projection = module.get_submodule(self._plan.family.output)
                stack.callback(on_leaving(projection, outputs.append).remove)
            self.logits(batch)
            with self.installed(parts):
                self.logits(batch)
        errors = {}
        for layout, (wanted, found) in zip(self._layouts, seen, strict=True):
            errors[f"{layout.layer.module}.output"] = float((found - wanted).norm() / wanted.norm().clamp(min=1e-30))
        return errors

    def tensors(self, parts: Sequence[Parts]) -> list[Tensors]:
        """Parts as the tensors of the result's layers."""
        made = []
        for number, (_, groups) in enumerate(self._plan.merged_layers):
            layout = self._layouts[number]
            made.append(layout.merge_heads(as_heads(parts[number]), self._repeated[number], groups))
        return made


def train_together(
    student: Student,
    batches: Sequence[Batch],
    held_out: Sequence[Batch],
    options: DistillationOptions,
    on_progress: OnProgress,
) -> tuple[list[dict[str, Tensor]] | None, Divergence]:
    """Adam on the divergence of the student's next-token distributions from the source's.

    Args:
        student: which starts from its `start`.
        batches: to learn from.
        held_out: other batches, at least one, on which the result is judged.
        options: of the stage.
        on_progress: called as steps are taken.

    Returns:
        Trained parts, None if they predict no better than those at the start; and the divergence before and after.
    """
    steps = options.steps
    on_progress(FitProgress(ALL_TOGETHER, 0, steps, f"step 0 of {steps:,}"))
    before = latest = student.divergence(held_out, student.start)
    if before < options.least:
        return None, Divergence(before, before)
    optimizer = RelativeAdam(student.start, RATE, steps)
    curve: list[tuple[int, float]] = []
    every = max(1, steps // _MEASURED)
    with kept_heap(student.model.device):
        for done, number in enumerate(batch_order(len(batches), steps, options.seed), start=1):
            _learn(student, batches[number], optimizer, options.precision)
            if done < steps and done % every == 0:
                latest = student.divergence(held_out, optimizer.parts())
                curve.append((done, latest))
            on_progress(FitProgress(ALL_TOGETHER, done, steps, f"step {done:,} of {steps:,}, KL {latest:.3f}"))
    after = student.divergence(held_out, optimizer.parts())
    if not after < before:
        return None, Divergence(before, before)
    return optimizer.results(), Divergence(before, after, tuple(curve))


def _learn(student: Student, batch: Batch, optimizer: RelativeAdam, precision: Precision) -> None:
    """One step on a batch, part by part, so that a backward pass needs memory for a part."""
    count = positions(batch, decodes=student.decodes)
    for part in parts_of(batch):
        with torch.no_grad(), precision():
            wanted = student.logits(part)
        with torch.enable_grad(), precision(), TrainingAttention(), student.installed(optimizer.parts()):
            divergence, _ = summed_divergence(student.logits(part), wanted, part, decodes=student.decodes)
            torch.autograd.backward(divergence / count)
    optimizer.step()
