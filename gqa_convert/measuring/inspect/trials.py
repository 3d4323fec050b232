"""Measures the loss of merging: the source runs in lockstep with copies that have fewer K/V heads, one layer at a time.

Moments are taken on one part of the calibration text, losses on the held-out part. Only one layer's merged weights are
in memory at a time: each copy receives them as it enters the layer.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gqa_convert.conversion.fit.assembly import Assembly, as_parts
from gqa_convert.conversion.fit.lockstep import Batch, CapturedModule, LockstepRunner
from gqa_convert.conversion.fit.statistics import moments_of
from gqa_convert.errors import DataError, NonFiniteError, UnsupportedFamilyError
from gqa_convert.families.geometry import AttentionLayer
from gqa_convert.measuring.inspect.layers import LayerInspection
from gqa_convert.measuring.results.schemas import GroupsLoss, InspectedLayer, PredictedLoss
from gqa_convert.merging.folding.heads import Heads
from gqa_convert.merging.folding.merge import Moments
from gqa_convert.text.labels import IGNORED

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
    progress: Callable[[str, int, int], None],
) -> tuple[list[InspectedLayer], PredictedLoss]:
    """Measure every layer, and the loss of the whole model for each number of groups.

    Args:
        model: the loaded source.
        layers: its attention layers.
        inspection: creates the inspection of a layer.
        groups: numbers of groups.
        text: batches for the moments.
        held_out: batches for the losses.
        progress: called with a stage's name, the steps done and all of them.

    Returns:
        The layers' records in their order, and the losses in nats per token: of the source, and by groups.

    Raises:
        UnsupportedFamilyError: the loaded module's parameters are not the checkpoint's tensors.
        NonFiniteError: a layer of the source gets or gives NaN or Inf.
    """
    by_name = {layer.module: layer for layer in layers}
    records: dict[str, InspectedLayer] = {}
    with ExitStack() as stack:
        source = stack.enter_context(LockstepRunner(model, text, list(by_name), paired=False))
        trials = [
            stack.enter_context(LockstepRunner(model, held_out, list(by_name), paired=False)) for _ in (0, *groups)
        ]  # the first: of the source
        for site, _, *copies in zip(source, *trials, strict=True):
            work = inspection(by_name[site.name])
            moments = _finite_moments(site, work.heads)
            for (count, merged), copy in zip(work.merged(groups, moments), copies, strict=True):
                copy.commit(_parameters(work, site, merged, count))
            records[site.name] = work.record(moments)
            progress("layers", len(records), len(layers))
        losses = []
        for trial in trials:
            losses.append(_losses(trial, held_out))
            progress("losses", len(losses), len(trials))
    before, tokens = losses[0]
    by_groups = tuple(
        GroupsLoss(groups=count, loss=_finite(after), increase=_finite(after - before))
        for count, (after, _) in zip(groups, losses[1:], strict=True)
    )
    loss = PredictedLoss(source=_finite(before), tokens=tokens, by_groups=by_groups)
    return [records[name] for name in by_name], loss


def _finite_moments(site: CapturedModule, heads: Heads) -> Moments:
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


def _parameters(work: LayerInspection, site: CapturedModule, merged: Heads, groups: int) -> dict[str, Tensor]:
    """Merged heads as parameters of the source's module, each repeated for its group."""
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


def _losses(trial: LockstepRunner, held_out: Sequence[Batch]) -> tuple[float, int]:
    """The loss in nats per token, and the number of predicted tokens."""
    total, tokens = 0.0, 0
    for batch, (logits, _) in zip(held_out, trial.logits(), strict=True):
        loss, count = _loss(logits, batch)
        total += loss
        tokens += count
    return total / tokens, tokens


def _loss(logits: Tensor, batch: Mapping[str, Tensor]) -> tuple[float, int]:
    """The sum of the losses of the predicted tokens and their number; without labels these are the input's next tokens."""
    labels = batch.get("labels")
    if labels is None:
        logits, labels = logits[:, :-1], batch["input_ids"][:, 1:]
    total = 0.0
    for row, targets in zip(logits, labels.to(logits.device), strict=True):
        total += float(torch.nn.functional.cross_entropy(row.float(), targets, reduction="none").double().sum())
    return total, int((labels != IGNORED).sum())


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
