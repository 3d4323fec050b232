"""The losses of merged copies of the source, and their divergences from it, on held-out text."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gqa_convert.conversion.fit.lockstep import Batch, LockstepRunner
from gqa_convert.measuring.inspect.prediction import Divergences, predict
from gqa_convert.measuring.results.schemas import GroupsLoss, PredictedLoss
from gqa_convert.text.labels import IGNORED
from gqa_convert.text.losses import kl_loss


@dataclass(frozen=True, slots=True)
class Trials:
    """The source and its merged copies, all of which have run over held-out text up to the last layer."""

    held_out: Sequence[Batch]
    judged: int
    """Batches, the first of the text, on which divergences are compared."""
    source: LockstepRunner
    merged: Mapping[int, LockstepRunner]
    """All layers merged by the closed form, by groups; over all batches."""
    fitted: Mapping[int, LockstepRunner]
    """Only the sampled layers merged, by short fits; over the judged batches."""
    single: Sequence[LockstepRunner]
    """Each layer merged alone, by the closed form; over the first batch."""
    sampled: Sequence[int]
    """The places of the sampled layers."""

    @property
    def runners(self) -> list[LockstepRunner]:
        return [self.source, *self.merged.values(), *self.fitted.values(), *self.single]


def measure(trials: Trials, *, last_stage: bool, progress: Callable[[str, int, int], None]) -> PredictedLoss:
    """The losses in nats per token, and the predictions of what remains of them after `fit`.

    Args:
        trials: the source and its merged copies.
        last_stage: whether `fit` can train all layers together.
        progress: called with the name of the stage, the batches done and all of them.
    """
    source = trials.source.logits()
    merged, fitted = ({n: _Copy(each) for n, each in some.items()} for some in (trials.merged, trials.fitted))
    single = [_Copy(each) for each in trials.single]
    before, tokens = 0.0, 0
    for number, batch in enumerate(trials.held_out):
        logits, _ = next(source)
        loss, count = _loss(logits, batch)
        before += loss
        tokens += count
        for copy in merged.values():
            copy.add(batch, logits, compare=number < trials.judged)
        for copy in [*(fitted.values() if number < trials.judged else ()), *(single if number == 0 else ())]:
            copy.add(batch, logits, compare=True)
        progress("losses", number + 1, len(trials.held_out))
    before /= tokens
    divergences = Divergences(
        merged={groups: copy.blocks for groups, copy in merged.items()},
        fitted={groups: copy.blocks for groups, copy in fitted.items()},
        single=[float(np.mean(copy.blocks)) for copy in single],
        sampled=trials.sampled,
    )
    after_fit = predict(divergences, last_stage=last_stage)
    by_groups = tuple(
        GroupsLoss(
            groups=groups,
            loss=_finite(copy.loss / tokens),
            increase=_finite(copy.loss / tokens - before),
            after_fit=after_fit.get(groups),
        )
        for groups, copy in merged.items()
    )
    return PredictedLoss(source=_finite(before), tokens=tokens, by_groups=by_groups)


class _Copy:
    """A merged copy, while its batches are measured.

    Attributes:
        loss: the sum over the batches.
        blocks: the mean divergence of each block that was compared.
    """

    def __init__(self, runner: LockstepRunner) -> None:
        self.loss = 0.0
        self.blocks: list[float] = []
        self._logits = runner.logits()

    def add(self, batch: Batch, source: Tensor, *, compare: bool) -> None:
        """Add the next batch; `compare` says whether its divergence is measured too."""
        logits, _ = next(self._logits)
        self.loss += _loss(logits, batch)[0]
        if compare:
            self.blocks += [divergence(ours, theirs) for ours, theirs in zip(logits, source, strict=True)]


def divergence(student: Tensor, source: Tensor) -> float:
    """The mean divergence in nats of a block's [L, vocabulary] logits."""
    labels = torch.zeros((1, len(source)), dtype=torch.long, device=source.device)
    total, count = kl_loss(student[None].float(), source[None].float(), labels)
    return float(total) / float(count)


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
