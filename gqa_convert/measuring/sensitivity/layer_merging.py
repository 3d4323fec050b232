"""Merges single layers of copies of the loaded source: by the closed form, or by a short fit."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np

from gqa_convert.conversion.fit.attention_calls import CapturedAttention
from gqa_convert.conversion.fit.layer_store import LayerStore
from gqa_convert.conversion.fit.layer_walk import Installing
from gqa_convert.conversion.fit.merged_attention import MergedAttention
from gqa_convert.conversion.fit.one_layer import FitOptions, OneLayer
from gqa_convert.conversion.fit.source_layers import SourceLayer
from gqa_convert.conversion.fit.statistics import moments_of
from gqa_convert.merging.attention_heads import Tensors
from gqa_convert.merging.merge_layer import merge_layer

SHORT_STEPS = 20
"""Gradient steps of a short fit."""
_BATCHES = 6
"""Batches of text of a short fit, of which one is held out from the gradient steps. Twelve leave 4% less (benchmarks/log.md)."""

Installations = Iterator[tuple[int, Installing]]
Merging = Callable[[SourceLayer, CapturedAttention, Sequence[int]], Installations]
"""Merges a layer of the source into each number of K/V heads, one in memory at a time.

It is called with the layer, its module in the source with its calls on the text, and the numbers; it yields each number, and
a context in which the source's module computes what the merged layer does.
"""


def merge_by_closed_form(layer: SourceLayer, attention: CapturedAttention, candidates: Sequence[int]) -> Installations:
    """Merge as method `factor` does; see `Merging`."""
    moments = moments_of(attention.calls)
    heads = layer.layout.split_heads(layer.tensors)
    wide = {name: array.astype(np.float32) for name, array in layer.tensors.items()}
    for groups in candidates:
        merged = merge_layer(heads, groups, layer.limits, moments)
        yield groups, _installing(layer, attention, layer.layout.merge_heads(merged, wide, groups), groups)


@dataclass(frozen=True)
class ShortFits:
    """Merges as `fit` does, on less text and in fewer steps. Each layer is fitted once for each number of K/V heads.

    Attributes:
        store: keeps the fitted layers.
        options: of the fit, with at most `SHORT_STEPS` gradient steps.
    """

    store: LayerStore
    options: FitOptions

    def merge(self, layer: SourceLayer, attention: CapturedAttention, candidates: Sequence[int]) -> Installations:
        """See `Merging`."""
        for groups in candidates:
            key = f"layer-{layer.layout.layer.number:05d}-{groups}"
            if self.store.record(key) is None:
                first = replace(attention, calls=attention.calls[:_BATCHES])
                tensors, record = OneLayer(first, layer, groups, self.options).fit()
                self.store.write(key, tensors, asdict(record))
            yield groups, _installing(layer, attention, self.store.read(key), groups)


def _installing(layer: SourceLayer, attention: CapturedAttention, tensors: Tensors, groups: int) -> Installing:
    module = MergedAttention(layer.layout, tensors, groups, attention.module)
    return partial(module.installed, module.tensors)
