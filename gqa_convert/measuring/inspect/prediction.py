"""Predicts the loss that remains after `fit` from short fits of a few layers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from gqa_convert.conversion.fit.whole_model import WORTHWHILE
from gqa_convert.measuring.results.schemas import LossAfterFit

FURTHER_GAIN: Final = 0.45
"""What the rest of the steps, the text and the refits of `fit` gain, as a power of what the short fits gain: short fits
that leave a share s of the closed form's divergence are predicted to become s ** 1.45. Set on the comparisons with
conversions in docs/inspecting.md.
"""
MOST_GAIN: Final = 0.3
"""The smallest factor by which these lower the divergence of short fits; none of the comparisons fell below it."""
LAST_STAGE_FACTOR: Final = 0.75
"""The share of that which remains after the last stage: 0.65 to 0.77 in the four runs of docs/quality.md."""
SPREAD: Final = 1.7
"""The interval reaches from the prediction divided by this to the prediction times this, and further where the held-out
blocks differ much. The losses of all conversions that were compared lie within (docs/inspecting.md).
"""
_EXACT: Final = 1e-6
"""The divergence in nats below which a merge loses nothing."""
_ONE_BLOCK: Final = 0.3
"""The relative standard error that is assumed where one block cannot show any."""


@dataclass(frozen=True, slots=True)
class Divergences:
    """Divergences from the source in nats per token on held-out blocks."""

    merged: Mapping[int, Sequence[float]]
    """By groups: of the closed form in all layers, for each block."""
    fitted: Mapping[int, Sequence[float]]
    """For some numbers of groups: of short fits in the sampled layers alone, for each block."""
    single: Sequence[float]
    """Of the closed form in one layer alone, for each layer, at the largest number of groups that is fitted."""
    sampled: Sequence[int]
    """The places of the sampled layers among all."""

    def scale(self) -> float:
        """Times as much as the sampled layers all layers lose: by the divergences of single layers, or by their number
        where single layers lose nothing.
        """
        some = sum(self.single[place] for place in self.sampled)
        if some > _EXACT * len(self.sampled) and math.isfinite(sum(self.single)):
            return sum(self.single) / some
        return len(self.single) / len(self.sampled)


def predict(found: Divergences, *, last_stage: bool) -> dict[int, LossAfterFit]:
    """The predicted loss increase and its interval by groups, for those whose divergences are finite.

    What the short fits leave, scaled to all layers, is a share of the divergence of the closed form, at most all of it.
    The smaller the share, the more `fit` is expected to gain beyond it. For numbers of groups without short fits, the logarithm of the share is interpolated over that of the number.

    Args:
        found: the divergences.
        last_stage: whether `fit` can train all layers together.
    """
    merged = {groups: mean for groups, blocks in found.merged.items() if math.isfinite(mean := float(np.mean(blocks)))}
    scale, shares, errors = found.scale(), {}, {}
    for groups, blocks in found.fitted.items():
        left = scale * float(np.mean(blocks))
        if merged.get(groups, 0.0) > _EXACT and math.isfinite(left):
            shares[groups] = math.log(min(1.0, max(left / merged[groups], _EXACT)))
            errors[groups] = _relative_error(blocks)
    predictions = {}
    for groups, divergence in merged.items():
        share = math.exp(_interpolated(groups, shares))
        increase = divergence * share * max(MOST_GAIN, share**FURTHER_GAIN)
        if last_stage and increase >= WORTHWHILE:
            increase *= LAST_STAGE_FACTOR
        factor = math.exp(math.hypot(math.log(SPREAD), 2 * _interpolated(groups, errors)))
        predictions[groups] = LossAfterFit(increase=increase, low=increase / factor, high=increase * factor)
    return predictions


def _interpolated(groups: int, known: Mapping[int, float]) -> float:
    """A quantity that is known for some numbers of groups; 0 where it is known for none."""
    places = sorted(known)
    return float(np.interp(math.log(groups), np.log(places), [known[each] for each in places])) if places else 0.0


def _relative_error(blocks: Sequence[float]) -> float:
    """The standard error of the mean of a divergence over blocks, relative to the mean; a guess for a single block."""
    mean = float(np.mean(blocks))
    if len(blocks) < 2 or mean <= _EXACT:
        return _ONE_BLOCK
    return float(np.std(blocks, ddof=1)) / math.sqrt(len(blocks)) / mean
