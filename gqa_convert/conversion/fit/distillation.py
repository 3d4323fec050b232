"""The last stage of `fit`: trains the merged projections of all layers together to predict what the source predicts
(Hinton et al. 2015, section 2).

The source and the student are one loaded model, run with the weights of either, so that the student costs no more than
its attention. The stage needs the whole model in memory; larger models skip it.
"""

from collections.abc import Iterator, Mapping, Sequence
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
from gqa_convert.conversion.fit.module_names import find_modules
from gqa_convert.conversion.fit.optimizer import RelativeAdam, batch_order
from gqa_convert.conversion.fit.precision import Precision, is_reduced
from gqa_convert.conversion.fit.progress import ALL_TOGETHER, FitProgress, OnProgress
from gqa_convert.conversion.fit.recomputation import layers_of, recomputed
from gqa_convert.conversion.fit.source_layer import attention_of
from gqa_convert.conversion.fit.training_attention import training_attention
from gqa_convert.conversion.plan import Plan
from gqa_convert.merging.attention_heads import LayerLayout, Tensors

RATE = 0.005
"""Of `RelativeAdam`."""
WORTHWHILE = 0.02
"""Nats per token: where the divergence after the layers is smaller, the stage gains too little for its time."""
_MEASURED = 4
"""In so many parts of the stage the divergence is measured."""
_TOKENS_TOGETHER = 512
"""Of sequences that one backward pass is made of."""
_BY_SEQUENCE = frozenset(
    {
        "input_ids",
        "attention_mask",
        "position_ids",
        "decoder_input_ids",
        "decoder_attention_mask",
        "labels",
        "encoder_outputs",
    }
)
"""Inputs with a row for each sequence; rows of others may be images or parts of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationOptions:
    """How all layers are trained together."""

    steps: int
    """Batches to see."""
    seed: int
    """Of their order."""
    rank: int = 0
    """Of the changes of query and output projections; 0 trains these as they are."""
    recomputes: bool = False
    """Whether layers keep only their inputs for the way back, and compute the rest again."""
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
        options: of the stage.
    """

    def __init__(self, plan: Plan, store: LayerStore, model: Any, options: DistillationOptions) -> None:
        self.model, self._store = model, store
        self.decodes = model.config.is_encoder_decoder
        finder = attention_of(plan)
        found = find_modules(model, [layer.module for layer, _ in plan.merged_layers])
        self._modules = [model.get_submodule(name) for name in found.values()]
        self._recomputed = layers_of(model, found.values()) if options.recomputes else []
        self._layouts = [LayerLayout(finder, layer) for layer, _ in plan.merged_layers]
        self._counts = [groups for _, groups in plan.merged_layers]
        self._assemblies = []
        self.start: list[dict[str, Tensor]] = []
        """The parts of each layer, as the store has them."""
        repeats_products = is_reduced(options.precision)
        for number, layout in enumerate(self._layouts):
            tensors, groups = store.read(number), self._counts[number]
            merged, repeated = layout.split_heads(tensors, groups), layout.repeated(tensors, groups)
            assembly = Assembly(layout, repeated, groups, model.device, repeats_products=repeats_products)
            self._assemblies.append(assembly)
            self.start.append(as_parts(merged, model.device))

    @contextmanager
    def installed(self, parts: Sequence[Parts]) -> Iterator[None]:
        """A context in which the model runs with these parts. Backward passes belong into it, since layers that are
        computed again read the weights.
        """
        with ExitStack() as stack:
            for module, assembly, own in zip(self._modules, self._assemblies, parts, strict=True):
                stack.enter_context(replaced(module, assembly(own)))
            stack.enter_context(recomputed(self._recomputed))
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

    def tensors(self, parts: Sequence[Parts]) -> dict[int, Tensors]:
        """Parts as the tensors of the result's layers, by the numbers of the layers."""
        made = {}
        for number, own in enumerate(parts):
            layout, groups = self._layouts[number], self._counts[number]
            before = layout.repeated(self._store.read(number), groups)
            made[number] = layout.merge_heads(as_heads(own), before, groups)
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

    def tell(done: int, kl: float | None) -> None:
        detail = f"step {done:,} of {options.steps:,}"
        if kl is not None:
            detail += f", KL {kl:.3f}"
        on_progress(FitProgress(ALL_TOGETHER, done, options.steps, detail))

    tell(0, None)
    before = latest = student.divergence(held_out, student.start)
    if before < options.least:
        return None, Divergence(before, before)
    optimizer = RelativeAdam(student.start, RATE, options.steps, options.rank)
    curve: list[tuple[int, float]] = []
    every = max(1, options.steps // _MEASURED)
    with kept_heap(student.model.device):
        for done, number in enumerate(batch_order(len(batches), options.steps, options.seed), start=1):
            with torch.enable_grad(), training_attention(options.precision):
                _learn(student, batches[number], optimizer)
            if done < options.steps and done % every == 0:
                latest = student.divergence(held_out, optimizer.parts())
                curve.append((done, latest))
            tell(done, latest)
    after = student.divergence(held_out, optimizer.parts())
    if not after < before:
        return None, Divergence(before, before)
    return optimizer.results(), Divergence(before, after, tuple(curve))


def _learn(student: Student, batch: Batch, optimizer: RelativeAdam) -> None:
    """One step on a batch."""
    count = positions(batch, decodes=student.decodes)
    for sequences in _by_sequence(batch):
        with torch.no_grad():
            wanted = student.logits(sequences)
        with student.installed(optimizer.parts()):
            divergence, _ = summed_divergence(student.logits(sequences), wanted, sequences, decodes=student.decodes)
            torch.autograd.backward(divergence / count)
    optimizer.step()


def _by_sequence(batch: Batch) -> Iterator[Mapping[str, Tensor]]:
    """A batch of text in parts of one sequence, or of some short ones, so that a backward pass needs memory for a part;
    any other batch whole.
    """
    sizes = {len(tensor) for tensor in batch.values()}
    if len(sizes) > 1 or not batch.keys() <= _BY_SEQUENCE:
        yield batch
        return
    length = max(tensor.shape[1] for tensor in batch.values() if not tensor.is_floating_point())
    together = max(1, _TOKENS_TOGETHER // length)
    for row in range(0, sizes.pop(), together):
        yield {name: tensor[row : row + together] for name, tensor in batch.items()}
