"""The last stage of `fit`: trains the merged projections of all layers together to predict what the source predicts.

The source and the student are one loaded model, run with the weights of either, so that the student costs no more than
its attention. The stage needs the whole model in memory; larger models skip it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor

from gqa_convert.checkpoint.heap import kept_heap
from gqa_convert.checkpoint.provenance import Divergence
from gqa_convert.conversion.fit.assembly import Assembly, Parts, as_heads, as_parts
from gqa_convert.conversion.fit.divergence import positions, summed_divergence
from gqa_convert.conversion.fit.limits import (
    TrainedModel,
    chosen_rank,
    has_room,
    must_recompute,
    trained_model,
)
from gqa_convert.conversion.fit.lockstep import Batch, find_modules, offloaded_weights, replaced
from gqa_convert.conversion.fit.merged_layers import MergedLayers
from gqa_convert.conversion.fit.precision import Precision, is_reduced
from gqa_convert.conversion.fit.recomputation import layers_of, recomputed
from gqa_convert.conversion.fit.records import LayerDone, TrainingProgress, TrainingRecord
from gqa_convert.conversion.fit.relative_adam import RelativeAdam, batch_order
from gqa_convert.conversion.fit.source_layer import attention_of
from gqa_convert.conversion.fit.training_attention import training_attention
from gqa_convert.conversion.plan import Plan
from gqa_convert.errors import OptionError
from gqa_convert.merging.attention_heads import LayerLayout, Tensors

RATE = 0.005
"""Of `RelativeAdam`."""
WORTHWHILE = 0.02
"""Nats per token: where the divergence after the layers is smaller, the stage gains too little for its time."""
_MEASURED = 4
"""In so many parts of the stage the divergence is measured."""


def train_together(
    plan: Plan,
    store: MergedLayers,
    model: Any,
    batches: Sequence[Batch],
    held_out: Sequence[Batch],
    on_layer: LayerDone,
    *,
    steps: int,
    seed: int,
    rank: int = 0,
    precision: Precision = nullcontext,
    requested: bool = True,
    requested_rank: int | None = None,
) -> None:
    """The stage for a plan whose layers are all in the store.

    Args:
        plan: of the conversion.
        store: of merged layers; it does not change if training does not help.
        model: the loaded source, all in memory.
        batches: of calibration text.
        held_out: other batches, at least one, on which the result is judged.
        on_layer: called as steps are taken, and with the record at the end.
        steps: batches to see.
        seed: of their order.
        rank: of the changes of query and output projections; 0 trains these as they are.
        precision: of the forward passes.
        requested: whether the user asked for the stage. Otherwise it runs only where it is `WORTHWHILE`.
        requested_rank: the rank if the user asked for it.
    """
    recomputes = must_recompute(_sizes(plan, batches), model.device, rank) is not False
    finder = attention_of(plan)
    layouts = [LayerLayout(finder, layer) for layer, _ in plan.merged_layers]
    counts = [groups for _, groups in plan.merged_layers]
    assemblies: dict[str, Assembly] = {}
    parts = []
    for number, (layout, groups) in enumerate(zip(layouts, counts, strict=True)):
        tensors = store.read(number)
        merged, repeated = layout.split_heads(tensors, groups), layout.repeated(tensors, groups)
        assemblies[layout.layer.module] = Assembly(
            layout, merged, repeated, groups, model.device, repeats_products=is_reduced(precision)
        )
        parts.append(as_parts(merged, model.device))
    count, least = len(layouts), 0.0 if requested else WORTHWHILE
    trained, kl = match_predictions(
        model,
        batches,
        held_out,
        assemblies,
        parts,
        steps=steps,
        seed=seed,
        rank=rank,
        least=least,
        precision=precision,
        recomputes=recomputes,
        on_step=lambda done, total, kl: on_layer(count, count, TrainingProgress(done, total, kl)),
    )
    made: dict[int, Tensors] = {}
    for number, new in enumerate(trained or ()):
        before = layouts[number].repeated(store.read(number), counts[number])
        made[number] = layouts[number].merge_heads(as_heads(new), before, counts[number])
    takes_steps = kl.before >= least
    record = TrainingRecord(
        kl_steps=steps if takes_steps else 0,
        kl=kl,
        requested_steps=steps if requested else None,
        kl_rank=rank if takes_steps else 0,
        requested_rank=requested_rank,
    )
    store.finish(made, record)
    on_layer(count, count, record)


def check_possible(model: Any, held_out: Sequence[Batch], steps: int) -> None:
    """Refuse a stage that the user asked for and that is not possible.

    Raises:
        OptionError: weights are left on the disk, or there is no text to judge by.
    """
    if offloaded_weights(model) is not None:
        raise OptionError(
            f"--kl-steps {steps} trains all layers together, which needs the model in memory, and this one does not fit: leave the option out"
        )
    if not held_out:
        raise OptionError(
            f"--kl-steps {steps} needs held-out text, and the layers use all of the text: lower --calibration-tokens, or name more text"
        )


def rank_for(plan: Plan, model: Any, batches: Sequence[Batch], asked: int | None) -> int:
    """The rank that `chosen_rank` says."""
    return chosen_rank(_sizes(plan, batches), model.device, asked)


def affordable(plan: Plan, model: Any, batches: Sequence[Batch], rank: int) -> bool:
    """Whether the stage is worth its memory and time here: all weights in memory, with room for what is trained and for
    one sequence's way back, and on a CPU no more than `has_room` allows."""
    if offloaded_weights(model) is not None:
        return False
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return has_room(parameters, _sizes(plan, batches), model.device, rank)


def _sizes(plan: Plan, batches: Sequence[Batch]) -> TrainedModel:
    return trained_model(plan, max(int(tensor.shape[1]) for batch in batches for tensor in batch.values()))


def _rows(batch: Batch) -> list[Batch]:
    """The sequences of a batch one by one, so that a backward pass needs memory for one."""
    return [{name: tensor[row : row + 1] for name, tensor in batch.items()} for row in range(len(batch["input_ids"]))]


def match_predictions(
    model: Any,
    batches: Sequence[Batch],
    held_out: Sequence[Batch],
    assemblies: Mapping[str, Assembly],
    parts: Sequence[Parts],
    *,
    steps: int,
    seed: int,
    rank: int = 0,
    least: float = 0.0,
    precision: Precision = nullcontext,
    recomputes: bool = False,
    on_step: Callable[[int, int, float | None], None] = lambda done, total, kl: None,
) -> tuple[list[dict[str, Tensor]] | None, Divergence]:
    """Adam on the divergence of the student's next-token distributions from the source's (Hinton et al. 2015).

    Args:
        model: the loaded source, all in memory; it is unchanged afterwards.
        batches: of calibration text.
        held_out: other batches, at least one, on which the result is judged.
        assemblies: how each layer's parts become its module's parameters, by the module's name in the checkpoint.
        parts: merged heads of each layer, in the order of `assemblies`.
        steps: batches to see.
        seed: of their order.
        rank: of the changes of query and output projections; 0 trains these as they are.
        least: divergence below which nothing is done.
        precision: the context of the forward passes of a step.
        recomputes: whether layers keep only their inputs for the way back, and compute the rest again.
        on_step: called with the steps done, all of them, and the latest divergence, None before it is known.

    Returns:
        Trained parts, None if they predict no better than those given; and the divergence before and after.
    """
    found = find_modules(model, list(assemblies))
    modules = [(model.get_submodule(name), assemblies[wanted]) for wanted, name in found.items()]
    layers = layers_of(model, found.values()) if recomputes else []

    def logits(batch: Batch) -> Tensor:
        result: Tensor = model(**batch, use_cache=False).logits
        return result

    def divergences(batches: Iterable[Batch], latest: Callable[[], Sequence[Parts]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Sums and counts, batch by batch; the student's weights are in place until the next batch is asked for, because
        layers that are computed again on the way back read them."""
        for batch in batches:
            moved = {name: tensor.to(model.device) for name, tensor in batch.items()}
            with torch.no_grad():
                wanted = logits(moved)
            with ExitStack() as stack:
                for (module, assembly), own in zip(modules, latest(), strict=True):
                    stack.enter_context(replaced(module, assembly(own)))
                stack.enter_context(recomputed(layers))
                yield summed_divergence(logits(moved), wanted, moved, decodes=model.config.is_encoder_decoder)

    def mean(latest: Callable[[], Sequence[Parts]]) -> float:
        with torch.no_grad():
            sums = [(float(total.double()), float(count)) for total, count in divergences(held_out, latest)]
        return sum(total for total, _ in sums) / sum(count for _, count in sums)

    on_step(0, steps, None)
    before = mean(lambda: parts)
    curve: list[tuple[int, float]] = []
    if before < least:
        return None, Divergence(before, before)
    optimizer = RelativeAdam(parts, RATE, steps, rank)
    with kept_heap(model.device):
        for done, number in enumerate(batch_order(len(batches), steps, seed)):
            with torch.enable_grad(), training_attention(precision):
                count = positions(batches[number], decodes=model.config.is_encoder_decoder)
                sums = divergences(_rows(batches[number]), optimizer.parts)
                optimizer.step(total / count for total, _ in sums)
            if done + 1 < steps and (done + 1) % max(1, steps // _MEASURED) == 0:
                curve.append((done + 1, mean(optimizer.parts)))
            on_step(done + 1, steps, curve[-1][1] if curve else before)
    after = mean(optimizer.parts)
    if not after < before:
        return None, Divergence(before, before)
    return optimizer.results(), Divergence(before, after, tuple(curve))
