"""The last stage of `fit`: trains the merged projections of all layers together to predict what the source predicts
(Hinton et al. 2015, section 2).

The source and the student are one loaded model, run with the weights of either, so that the student costs no more than
its attention. The stage needs the whole model in memory; larger models skip it.
"""

import operator
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gqa_convert.conversion.calibration.streams import Batch, tokens_of
from gqa_convert.conversion.layers.attention_calls import own_rows, parts_of
from gqa_convert.conversion.layers.layer_store import HALFWAY, SharedStore, layer_key
from gqa_convert.conversion.layers.layer_walk import list_elements
from gqa_convert.conversion.layers.merged_attention import MergedAttention
from gqa_convert.conversion.layers.model_loading import Precision, find_modules, wrapped_forward
from gqa_convert.conversion.layers.optimizer import RelativeAdam, batch_order
from gqa_convert.conversion.layers.source_layers import attention_of
from gqa_convert.conversion.plan import Plan
from gqa_convert.conversion.progress import ALL_TOGETHER, FitProgress, OnProgress
from gqa_convert.losses.distillation import summed_divergence
from gqa_convert.merging.attention_heads import LayerLayout, Tensors
from gqa_convert.processes import by_first, total
from gqa_convert.runtime.json_objects import JsonObject

RATE = 0.005
"""Of `RelativeAdam`."""
SAVED_EVERY = 600.0
"""Seconds of the stage that a kill may cost."""
WORTHWHILE = 0.02
"""Nats per token: where the divergence after the layers is smaller, the stage gains too little for its time."""
AllWeights = Sequence[Mapping[str, Tensor]]
"""Weights and biases of each merged layer."""


class Student:
    """A loaded source in which the merged tensors of all layers can stand in place of its own.

    Args:
        plan: of the conversion.
        store: with all its layers.
        model: the loaded source, all in memory; it is unchanged outside `installed`.
        precision: of the forward passes of a step.
        recompute: whether activations inside a layer are computed again in the backward pass (Chen et al. 2016, section 4)
            in place of being kept; the gradients are the same.

    Attributes:
        weights: of each layer, as the store has them; training changes them.
    """

    def __init__(
        self,
        plan: Plan,
        store: SharedStore,
        model: Any,
        precision: Precision,
        *,
        recompute: bool = False,
    ) -> None:
        self.model, self.precision = model, precision
        finder = attention_of(plan)
        names = find_modules(model, [layer.module for layer, _ in plan.merged_layers])
        self._layouts = [LayerLayout(finder, layer) for layer, _ in plan.merged_layers]
        self._layers: list[MergedAttention] = []
        for number, (layer, groups) in enumerate(plan.merged_layers):
            tensors, module = (
                store.read(layer_key(number)),
                model.get_submodule(names[layer.module]),
            )
            self._layers.append(MergedAttention(self._layouts[number], tensors, groups, module))
        self.weights = [layer.tensors for layer in self._layers]
        self._recomputed = [*list_elements(model, names.values())] if recompute else []

    @contextmanager
    def installed(self, weights: AllWeights) -> Iterator[None]:
        """A context in which the model runs with these weights."""
        with ExitStack() as stack:
            for layer, own in zip(self._layers, weights, strict=True):
                stack.enter_context(layer.installed(own))
            yield

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """A context in which layers are called as `recompute` says; it must last until the backward pass is over."""
        with ExitStack() as stack:
            if (
                self._recomputed
            ):  # what autocast would keep of the weights in 16 bits is made again too
                stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
                torch.set_autocast_cache_enabled(False)
            for name in self._recomputed:
                layer = self.model.get_submodule(name)
                again = partial(
                    checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
                )
                stack.enter_context(wrapped_forward(layer, again))
            yield

    def logits(self, batch: Batch) -> Tensor:
        """[B, L, vocabulary], of the source, or of the student inside `installed`."""
        moved = {name: tensor.to(self.model.device) for name, tensor in batch.items()}
        logits: Tensor = self.model(**moved, use_cache=False).logits
        return logits

    def divergence(self, batches: Sequence[Batch], weights: AllWeights) -> float:
        """KL(source || student), in nats per token."""
        own = 0.0
        with torch.no_grad():
            for batch in own_rows(batches).values():
                wanted = self.logits(batch)
                with self.installed(weights):
                    own += float(summed_divergence(self.logits(batch), wanted))
        divergence: float = total(own) / sum(tokens_of(batch).numel() for batch in batches)
        return divergence

    def tensors(self, weights: AllWeights) -> Tensors:
        """Weights as they are published."""
        made: Tensors = {}
        for layer, layout, own in zip(self._layers, self._layouts, weights, strict=True):
            arrays = {name: tensor.cpu().numpy() for name, tensor in layer.joined(own).items()}
            made |= layout.in_result_types(arrays)
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class LastStage:
    """How all layers are trained together.

    Attributes:
        steps: batches to see.
        seed: of their order.
        least: the divergence, in nats per token, below which nothing is done.
        request: what the stage depends on beside the layers, plain data; what was saved for another request is not used.
    """

    steps: int
    seed: int
    least: float
    request: JsonObject


def train_together(
    student: Student,
    store: SharedStore,
    batches: Sequence[Batch],
    validation: Sequence[Batch],
    options: LastStage,
    on_progress: OnProgress,
) -> tuple[int, AllWeights | None]:
    """Adam on the divergence of the student's next-token distributions from the source's.

    Args:
        student: whose `weights` are trained.
        store: keeps the state every `SAVED_EVERY` seconds; one that it has is gone on with.
        batches: to learn from.
        validation: other batches, at least one, which decide whether it is worth its time, and whether it helped.
        options: of the stage.
        on_progress: called as steps are taken.

    Returns:
        The steps taken, 0 if there was too little to gain; and trained weights, None if they predict no better than those
        at the start.
    """
    steps = options.steps
    on_progress(FitProgress(ALL_TOGETHER, 0, steps, f"step 0 of {steps:,}"))
    before = student.divergence(validation, student.weights)
    if before < options.least:
        return 0, None
    optimizer = RelativeAdam(student.weights, RATE, steps)
    taken = _restore(optimizer, store, options.request)
    saved = time.monotonic()
    rows = own_rows(batches)
    for number in batch_order(len(batches), steps, options.seed)[taken:]:
        own = parts_of(rows[number]) if number in rows else []
        for part in own:  # a backward pass needs memory for a part
            with torch.no_grad(), student.precision():
                wanted = student.logits(part)
            with (
                torch.enable_grad(),
                student.precision(),
                student.installed(optimizer.layers),
                student.recomputing(),
            ):
                divergence = summed_divergence(student.logits(part), wanted)
                torch.autograd.backward(divergence / tokens_of(batches[number]).numel())
        optimizer.step()
        taken += 1
        on_progress(FitProgress(ALL_TOGETHER, taken, steps, f"step {taken:,} of {steps:,}"))
        is_late = by_first(partial(operator.gt, time.monotonic() - saved, SAVED_EVERY))
        if is_late and taken < steps:
            state = {name: tensor.cpu().numpy() for name, tensor in optimizer.state().items()}
            store.write(HALFWAY, state, {"request": options.request, "taken": taken})
            saved = time.monotonic()
    after = student.divergence(validation, optimizer.layers)
    return steps, optimizer.results() if after < before else None


def _restore(optimizer: RelativeAdam, store: SharedStore, request: JsonObject) -> int:
    """Go on with what an interrupted run has saved; returns the steps that it had taken, 0 if there is none."""
    saved = store.record(HALFWAY)
    if saved is None or saved["request"] != request:
        return 0
    optimizer.restore(
        {name: torch.from_numpy(array) for name, array in store.read(HALFWAY).items()},
        saved["taken"],
    )
    return int(saved["taken"])
