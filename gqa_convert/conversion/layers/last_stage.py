"""The last stage of `fit`: trains the merged projections of all layers together to predict what the
source predicts (Hinton et al. 2015, section 2).

The source and the student are one loaded model, run with the weights of either, so that the student
costs no more than its attention. The stage needs the whole model in memory, or a share of it in
each of several processes (FSDP2; Zhao et al. 2023); larger models skip it.
"""

import operator
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gqa_convert.conversion.calibration.streams import Batch, tokens_of
from gqa_convert.conversion.plan import Plan
from gqa_convert.conversion.progress import ALL_TOGETHER, FitProgress, OnProgress
from gqa_convert.losses.distillation import summed_divergence
from gqa_convert.merging.attention_heads import Tensors
from gqa_convert.processes import by_first, count, rank, total
from gqa_convert.runtime.json_objects import JsonObject
from gqa_convert.sharding import idle_passes, is_sharded, shard_as, whole

from .attention_calls import own_rows, parts_of
from .layer_store import HALFWAY, SharedStore, layer_key
from .merged_attention import MergedAttention
from .model_loading import Precision, find_modules, list_elements, wrapped_forward
from .optimizer import RelativeAdam
from .source_layers import layouts_of

RATE = 0.005
"""Of `RelativeAdam`."""
SAVED_EVERY = 600.0
"""Seconds of the stage that a kill may cost."""
WORTHWHILE = 0.02
"""Nats per token: where the divergence after the layers is smaller, the stage gains too little for
its time.
"""
_TRAINED = "gqa_trained"
"""The name inside an attention module under which its merged layer is added."""


class TrainedLayer(torch.nn.Module):  # type: ignore[misc]  # torch is not followed
    """A merged layer, inside the attention module in whose place it computes. FSDP2 shards it as it
    does other modules: the tensors are whole while `forward` runs, and while its gradients are
    made.

    Args:
        merged: the layer, which is emptied.
    """

    def __init__(self, merged: MergedAttention) -> None:
        super().__init__()
        self._merged = merged
        self._names = [*merged.tensors]
        self.tensors = torch.nn.ParameterList(merged.tensors.values())
        merged.tensors = {}  # so that nothing holds whole tensors where these are sharded

    def named(self) -> dict[str, Tensor]:
        """Weights and biases by name, in float32; training changes them."""
        return dict(zip(self._names, self.tensors, strict=True))

    def forward(self, attend: Any, *args: Any, **kwargs: Any) -> Any:
        """What the attention module's own `forward`, which is `attend`, computes with them."""
        with self._merged.installed(self.named()):
            return attend(*args, **kwargs)

    def published(self) -> Tensors:
        """The tensors as they are published, on the first process. Every process calls this."""
        tensors = {name: whole(tensor.detach()) for name, tensor in self.named().items()}
        if rank():
            return {}
        return self._merged.layout.in_result_types(self._merged.arrays(tensors))


class Student:
    """A loaded source in which the merged tensors of all layers can stand in place of its own.

    Args:
        plan: of the conversion.
        store: with all its layers.
        model: the loaded source, all in memory, of this process or in shards; it computes what it
            did outside `installed`.
        precision: of the forward passes of a step.
        recompute: whether activations inside a layer are computed again in the backward pass (Chen
            et al. 2016, section 4) in place of being kept; the gradients are the same.

    Attributes:
        layers: what is trained, as the store has it in the beginning.
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
        self.is_sharded = is_sharded(model)
        names = find_modules(model, [layer.module for layer, _ in plan.merged_layers])
        self._recomputed = [*list_elements(model, names.values())] if recompute else []
        self._modules = [model.get_submodule(name) for name in names.values()]
        # the merged layers, inside the modules in whose place they compute
        self.layers: list[TrainedLayer] = []
        layouts = layouts_of(plan)
        for number, (layer, kv_heads) in enumerate(plan.merged_layers):
            module = self._modules[number]
            tensors = store.read(layer_key(number))
            layout = layouts[layer.module]
            trained = TrainedLayer(MergedAttention(layout, tensors, kv_heads, module))
            module.add_module(_TRAINED, trained)
            if self.is_sharded:
                shard_as(model, trained)
            self.layers.append(trained)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """A context in which the model runs with the weights of the merged layers. It must last
        until the backward pass is over, which computes activations again if `recompute` says so.
        """
        with ExitStack() as stack:
            for trained, module in zip(self.layers, self._modules, strict=True):
                # by its call, which runs the hooks of FSDP, and not by its forward
                attend: Any = partial(trained.__call__, module.forward)
                stack.enter_context(wrapped_forward(module, attend))
            if self._recomputed:
                # what autocast would keep of the weights in 16 bits is made again too
                stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
                torch.set_autocast_cache_enabled(False)
            for name in self._recomputed:
                layer = self.model.get_submodule(name)
                options = {"use_reentrant": False, "preserve_rng_state": False}
                again = partial(checkpoint, layer.forward, **options)
                stack.enter_context(wrapped_forward(layer, again))
            yield

    def logits(self, batch: Batch) -> Tensor:
        """[B, L, vocabulary], of the source, or of the student inside `installed`."""
        moved = {name: tensor.to(self.model.device) for name, tensor in batch.items()}
        logits: Tensor = self.model(**moved, use_cache=False).logits
        return logits

    def in_step(self, own: Sequence[Batch], batch: Batch) -> list[tuple[Batch, float]]:
        """What this process reads, and how much it counts. Where weights are sharded, every process
        runs the model equally often: one that has less to read reads something that does not count.

        Args:
            own: rows of this process.
            batch: any, of which some rows do not count.
        """
        passes = [(part, 1.0) for part in own]
        idle = idle_passes(self.model, len(own))
        return passes + [(parts_of(batch)[0], 0.0)] * idle

    def divergence(self, batches: Sequence[Batch]) -> float:
        """KL(source || student), in nats per token."""
        own = 0.0
        rows = [*own_rows(batches).values()]
        with torch.no_grad():
            for batch, counts in self.in_step(rows, batches[0]):
                wanted = self.logits(batch)
                with self.installed():
                    own += counts * float(summed_divergence(self.logits(batch), wanted))
        divergence: float = total(own) / sum(tokens_of(batch).numel() for batch in batches)
        return divergence

    def tensors(self) -> Tensors:
        """All weights as they are published, on the first process. Every process calls this."""
        made: Tensors = {}
        for layer in self.layers:
            made |= layer.published()
        return made


def train_together(
    student: Student,
    store: SharedStore,
    batches: Sequence[Batch],
    order: Sequence[int],
    request: JsonObject,
    on_progress: OnProgress,
) -> None:
    """Adam on the divergence of the student's next-token distributions from the source's.

    Args:
        student: whose layers are trained.
        store: keeps the state every `SAVED_EVERY` seconds; one that it has is gone on with.
        batches: to learn from.
        order: the number of the batch that each step sees.
        request: what the stage depends on beside the layers, plain data; what was saved for another
            request is not used.
        on_progress: called as steps are taken.
    """
    steps = len(order)
    # begin, or go on with what a killed run has saved
    optimizer = RelativeAdam([layer.named() for layer in student.layers], RATE, steps)
    taken = _restore(optimizer, store, request)
    saved = time.monotonic()
    rows = own_rows(batches)
    for number in order[taken:]:
        own = parts_of(rows[number]) if number in rows else []
        for part, counts in student.in_step(own, batches[number]):
            _add_gradients(student, part, counts, tokens_of(batches[number]).numel())
        optimizer.step()
        taken += 1
        # tell, and save
        on_progress(FitProgress(ALL_TOGETHER, taken, steps, f"step {taken:,} of {steps:,}"))
        is_late = by_first(partial(operator.gt, time.monotonic() - saved, SAVED_EVERY))
        if is_late and taken < steps:
            store.write(HALFWAY, optimizer.state(), {"request": request, "taken": taken})
            saved = time.monotonic()


def _add_gradients(student: Student, part: Batch, counts: float, tokens: int) -> None:
    """Add the gradients of the divergence on a part of a batch, as much as the part counts.

    Args:
        student: whose layers get gradients.
        part: a backward pass needs memory for it alone.
        counts: see `Student.in_step`.
        tokens: of the whole batch in all processes.
    """
    with torch.no_grad(), student.precision():
        wanted = student.logits(part)
    if student.is_sharded:
        counts *= count()  # FSDP2 averages what is to be summed
    with torch.enable_grad(), student.precision(), student.installed():
        divergence = summed_divergence(student.logits(part), wanted)
        torch.autograd.backward(divergence * counts / tokens)


def _restore(optimizer: RelativeAdam, store: SharedStore, request: JsonObject) -> int:
    """Go on with what an interrupted run has saved; returns the steps that it had taken, 0 if there
    is none.
    """
    saved = store.record(HALFWAY)
    if saved is None or saved["request"] != request:
        return 0
    optimizer.restore(partial(store.read_one, HALFWAY), saved["taken"])
    return int(saved["taken"])
