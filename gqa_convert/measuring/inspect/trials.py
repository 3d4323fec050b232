"""Measures the loss of merging: the source runs in lockstep with copies that have fewer K/V heads, one layer at a time.

Moments are taken on one part of the calibration text, losses on the held-out part. Only one layer's merged weights are
in memory at a time: each copy receives them as it enters the layer.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from torch import Tensor

from gqa_convert.conversion.fit.assembly import Assembly, as_parts
from gqa_convert.conversion.fit.lockstep import Batch, CapturedModule, LockstepRunner
from gqa_convert.conversion.fit.statistics import moments_of
from gqa_convert.conversion.plan import spread
from gqa_convert.errors import DataError, NonFiniteError, UnsupportedFamilyError
from gqa_convert.families.geometry import AttentionLayer
from gqa_convert.measuring.inspect.layers import LayerInspection
from gqa_convert.measuring.inspect.losses import Trials, measure
from gqa_convert.measuring.inspect.quick_fit import (
    FITTED_GROUPS,
    STEPS,
    compared_batches,
    quickly_fitted,
    sampled_layers,
)
from gqa_convert.measuring.results.schemas import InspectedLayer, PredictedLoss, QuickFit
from gqa_convert.merging.folding.heads import Heads
from gqa_convert.merging.folding.merge import Moments

_HELD_OUT = 5
"""One in this many blocks is held out from the moments."""


def split(batches: Sequence[Batch]) -> tuple[list[Batch], list[Batch]]:
    """Calibration text for the moments, and a fifth of its blocks, at least one, for the losses.

    Raises:
        DataError: there is only one block.
    """
    blocks = [len(batch["input_ids"]) for batch in batches]
    left = max(1, sum(blocks) // _HELD_OUT)
    if sum(blocks) < 2:
        raise DataError(
            "the calibration text has one block and none left to hold out for the loss: name more text or more --calibration-tokens"
        )
    text: list[Batch] = list(batches)
    held_out: list[Batch] = []
    while left:
        batch = text.pop()
        taken = min(left, len(batch["input_ids"]))
        left -= taken
        held_out.append({name: tensor[-taken:] for name, tensor in batch.items()})
        if taken < len(batch["input_ids"]):
            text.append({name: tensor[:-taken] for name, tensor in batch.items()})
    return text, held_out[::-1]


def run_trials(
    model: Any,
    layers: Sequence[AttentionLayer],
    inspection: Callable[[AttentionLayer], LayerInspection],
    groups: Sequence[int],
    text: Sequence[Batch],
    held_out: Sequence[Batch],
    *,
    seed: int,
    last_stage: bool,
    progress: Callable[[str, int, int], None],
) -> tuple[list[InspectedLayer], PredictedLoss]:
    """Measure every layer, and the loss of the whole model for each number of groups.

    Args:
        model: the loaded source.
        layers: its attention layers.
        inspection: creates the inspection of a layer.
        groups: numbers of groups.
        text: batches for the moments, and for fitting a few layers.
        held_out: batches for the losses.
        seed: of the order of batches in gradient steps.
        last_stage: whether `fit` can train all layers of this model together.
        progress: called with a stage's name, the steps done and all of them.

    Returns:
        The layers' records in their order, and the losses in nats per token: of the source, and by groups.

    Raises:
        UnsupportedFamilyError: the loaded module's parameters are not the checkpoint's tensors.
        NonFiniteError: a layer of the source gets or gives NaN or Inf.
    """
    by_name = {layer.module: layer for layer in layers}
    modules = list(by_name)
    sampled, fitted_groups = sampled_layers(len(modules)), spread(groups, FITTED_GROUPS)
    judged = compared_batches(held_out)
    records: dict[str, InspectedLayer] = {}
    with ExitStack() as stack:

        def run(batches: Sequence[Batch]) -> LockstepRunner:
            return stack.enter_context(LockstepRunner(model, batches, modules, paired=False))

        source = run(text)
        trials = Trials(
            held_out=held_out,
            judged=len(judged),
            source=run(held_out),
            merged={count: run(held_out) for count in groups},
            fitted={count: run(judged) for count in fitted_groups},
            single=[run(held_out[:1]) for _ in modules],
            sampled=sampled,
        )
        for site, *sites in zip(source, *trials.runners, strict=True):
            captured = dict(zip(trials.runners, sites, strict=True))
            work, place = inspection(by_name[site.name]), modules.index(site.name)
            moments = finite_moments(site, work.heads)
            for count, merged in work.merged(groups, moments):
                parameters = merged_parameters(work, site, merged, count)
                captured[trials.merged[count]].commit(parameters)
                if count == fitted_groups[-1]:
                    captured[trials.single[place]].commit(parameters)
                if count in fitted_groups and place in sampled:
                    captured[trials.fitted[count]].commit(quickly_fitted(site, work, count, seed))
            records[site.name] = work.record(moments)
            progress("layers", len(records), len(layers))
        measured = measure(trials, last_stage=last_stage, progress=progress)
    quick = QuickFit(
        modules=tuple(modules[place] for place in sampled),
        groups=tuple(fitted_groups),
        steps=STEPS,
        tokens=sum(batch["input_ids"].numel() for batch in judged),
        last_stage=last_stage,
    )
    return [records[name] for name in by_name], measured.model_copy(update={"quick_fit": quick})


def finite_moments(site: CapturedModule, heads: Heads) -> Moments:
    """The moments of the source's inputs of a layer.

    Raises:
        NonFiniteError: the source yields NaN or Inf.
    """
    moments = moments_of(site, heads)
    if not (np.isfinite(moments.queries).all() and np.isfinite(moments.keys).all()):
        raise NonFiniteError(
            f"the source yields NaN or Inf at {site.name} on the calibration text: check that its logits on this text are finite"
        )
    return moments


def merged_parameters(work: LayerInspection, site: CapturedModule, merged: Heads, groups: int) -> dict[str, Tensor]:
    """Merged heads as parameters of the source's module, each repeated for its group.

    Raises:
        UnsupportedFamilyError: the loaded module's parameters are not the checkpoint's tensors.
    """
    own = site.parameters()
    device = next(iter(own.values())).device
    made = Assembly(work.parts, work.heads, work.tensors, groups, device)(as_parts(merged, device))
    for name, tensor in made.items():
        if name not in own or own[name].shape != tensor.shape:
            raise UnsupportedFamilyError(
                f"transformers loads {site.name} with other parameters than the checkpoint has ({name}), so that its loss can't be predicted: "
                "inspect it without calibration text"
            )
    return made
