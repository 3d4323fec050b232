"""Merges single layers of copies of the loaded source: by the closed form, or by a short fit."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from torch import Tensor

from gqa_convert.conversion.fit.attention_calls import CapturedAttention
from gqa_convert.conversion.fit.head_parameters import Assembly, as_parts, repeated_parameters
from gqa_convert.conversion.fit.layer_store import LayerStore
from gqa_convert.conversion.fit.one_layer import FitOptions, OneLayer
from gqa_convert.conversion.fit.precision import Precision
from gqa_convert.conversion.fit.source_layer import SourceLayer
from gqa_convert.conversion.fit.statistics import moments_of
from gqa_convert.errors import NonFiniteError
from gqa_convert.measuring.sensitivity.layer_errors import InspectedLayer, describe_layer, merge_candidates
from gqa_convert.merging.merge_layer import Moments
from gqa_convert.merging.methods import CALIBRATED_DEFAULT

SHORT_STEPS: Final = 20
"""Gradient steps of a short fit."""
_BATCHES: Final = 6
"""Batches of text of a short fit, of which one is held out from the gradient steps. Twelve leave 4% less (docs/log.md)."""


class ClosedForm:
    """Merges by the closed form of method `factor`.

    Attributes:
        layers: the records of the layers that were merged, by module.
    """

    def __init__(self) -> None:
        self.layers: dict[str, InspectedLayer] = {}

    def merge(
        self, layer: SourceLayer, attention: CapturedAttention, candidates: Sequence[int]
    ) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Merge a layer into each number of K/V heads, one in memory at a time.

        Args:
            layer: of the source.
            attention: the module in the source, with its calls on the text.
            candidates: numbers of K/V heads.

        Yields:
            Each number, and the parameters of the source's module with K/V heads repeated.

        Raises:
            NonFiniteError: the source yields NaN or Inf.
        """
        source = layer.layout.split_heads(layer.tensors)
        moments = _finite_moments(attention)
        errors = []
        device = attention.device
        for merged, error in merge_candidates(layer, source, candidates, moments):
            errors.append(error)
            assembly = Assembly(layer.layout, layer.tensors, error.groups, device)
            yield error.groups, assembly(as_parts(merged, device))
        self.layers[attention.name] = describe_layer(layer, errors)


@dataclass(frozen=True, slots=True)
class ShortFits:
    """Merges as `fit` does, on less text and in fewer steps. Each layer is fitted once for each number of K/V heads.

    Attributes:
        store: keeps the fitted layers.
        steps: of the conversion's gradient stage, of which a short fit takes at most `SHORT_STEPS`.
        precision: of the products with activations.
        seed: of the order of batches in gradient steps.
    """

    store: LayerStore
    steps: int
    precision: Precision
    seed: int

    def merge(
        self, layer: SourceLayer, attention: CapturedAttention, candidates: Sequence[int]
    ) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """As `ClosedForm.merge`."""
        for groups in candidates:
            number = 1000 * layer.layout.layer.number + groups
            if self.store.record(number) is None:
                first = replace(attention, calls=attention.calls[:_BATCHES])
                self._fit(number, layer, first, groups)
            yield groups, repeated_parameters(layer.layout, self.store.read(number), groups)

    def _fit(self, number: int, layer: SourceLayer, attention: CapturedAttention, groups: int) -> None:
        _finite_moments(attention)
        steps = min(self.steps, SHORT_STEPS)
        options = FitOptions(
            groups=groups, method=CALIBRATED_DEFAULT, steps=steps, seed=self.seed, precision=self.precision
        )
        merged, record = OneLayer(attention, layer, options).fit()
        self.store.write(number, layer.layout.merge_heads(merged, layer.tensors, groups), record)


Merging = ClosedForm | ShortFits


def _finite_moments(attention: CapturedAttention) -> Moments:
    moments = moments_of(attention.calls)
    if any(moment is not None and not np.isfinite(moment).all() for moment in (moments.queries, moments.keys)):
        raise NonFiniteError(
            f"the source yields NaN or Inf at {attention.name} on the calibration text: check that its logits on this text are finite"
        )
    return moments
