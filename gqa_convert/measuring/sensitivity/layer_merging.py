"""Merges single layers of copies of the loaded source: by the closed form, or by a short fit."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from gqa_convert.conversion.fit.attention_calls import CapturedAttention
from gqa_convert.conversion.fit.layer_store import LayerStore
from gqa_convert.conversion.fit.layer_walk import Installing
from gqa_convert.conversion.fit.merged_attention import MergedAttention
from gqa_convert.conversion.fit.one_layer import FitOptions, OneLayer
from gqa_convert.conversion.fit.source_layers import SourceLayer
from gqa_convert.conversion.fit.statistics import moments_of
from gqa_convert.errors import NonFiniteError
from gqa_convert.measuring.sensitivity.layer_errors import InspectedLayer, describe_layer, merge_candidates
from gqa_convert.merging.attention_heads import Tensors
from gqa_convert.merging.merge_layer import Moments

SHORT_STEPS: Final = 20
"""Gradient steps of a short fit."""
_BATCHES: Final = 6
"""Batches of text of a short fit, of which one is held out from the gradient steps. Twelve leave 4% less (benchmarks/log.md)."""


class ClosedForm:
    """Merges by the closed form of method `factor`.

    Attributes:
        layers: the records of the layers that were merged, by module.
    """

    def __init__(self) -> None:
        self.layers: dict[str, InspectedLayer] = {}

    def merge(
        self, layer: SourceLayer, attention: CapturedAttention, candidates: Sequence[int]
    ) -> Iterator[tuple[int, Installing]]:
        """Merge a layer into each number of K/V heads, one in memory at a time.

        Args:
            layer: of the source.
            attention: the module in the source, with its calls on the text.
            candidates: numbers of K/V heads.

        Yields:
            Each number, and a context in which the source's module computes what the merged layer does.

        Raises:
            NonFiniteError: the source yields NaN or Inf.
        """
        moments = _finite_moments(attention)
        wide = {name: array.astype(np.float32) for name, array in layer.tensors.items()}
        errors = []
        for merged, error in merge_candidates(layer, candidates, moments):
            errors.append(error)
            tensors = layer.layout.merge_heads(merged, wide, error.groups)
            yield error.groups, _installing(layer, attention, tensors, error.groups)
        self.layers[attention.name] = describe_layer(layer, errors)


@dataclass(frozen=True, slots=True)
class ShortFits:
    """Merges as `fit` does, on less text and in fewer steps. Each layer is fitted once for each number of K/V heads.

    Attributes:
        store: keeps the fitted layers.
        options: of the fit, with at most `SHORT_STEPS` gradient steps.
    """

    store: LayerStore
    options: FitOptions

    def merge(
        self, layer: SourceLayer, attention: CapturedAttention, candidates: Sequence[int]
    ) -> Iterator[tuple[int, Installing]]:
        """As `ClosedForm.merge`."""
        for groups in candidates:
            key = f"layer-{layer.layout.layer.number:05d}-{groups}"
            if self.store.record(key) is None:
                first = replace(attention, calls=attention.calls[:_BATCHES])
                _finite_moments(first)
                tensors, record = OneLayer(first, layer, groups, self.options).fit()
                self.store.write(key, tensors, asdict(record))
            yield groups, _installing(layer, attention, self.store.read(key), groups)


Merging = ClosedForm | ShortFits


def _installing(layer: SourceLayer, attention: CapturedAttention, tensors: Tensors, groups: int) -> Installing:
    module = MergedAttention(layer.layout, tensors, groups, attention.module)
    return partial(module.installed, module.tensors)


def _finite_moments(attention: CapturedAttention) -> Moments:
    moments = moments_of(attention.calls)
    if any(moment is not None and not np.isfinite(moment).all() for moment in (moments.queries, moments.keys)):
        raise NonFiniteError(
            f"the source yields NaN or Inf at {attention.name} on the calibration text: check that its logits on this text are finite"
        )
    return moments
