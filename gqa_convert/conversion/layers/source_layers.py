"""Reads the attention layers of the source, one at a time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from gqa_convert.checkpoint.source_files import SourceFiles
from gqa_convert.conversion.plan import Plan
from gqa_convert.errors import NonFiniteError
from gqa_convert.families.geometry import AttentionFinder, AttentionLayer
from gqa_convert.merging.absorption_limits import AbsorptionLimits
from gqa_convert.merging.attention_heads import LayerLayout, Tensors


class SourceLayer(NamedTuple):
    """One attention layer of the source, in memory."""

    layout: LayerLayout
    tensors: Tensors
    limits: AbsorptionLimits


ReadLayer = Callable[[AttentionLayer], SourceLayer]
"""Reads a layer of the source. It raises NonFiniteError where a tensor holds NaN or Inf."""


@contextmanager
def open_layers(plan: Plan) -> Iterator[ReadLayer]:
    """Open the weight files of a plan's source, a local checkpoint; yields what reads one layer."""
    finder = _finder(plan)

    def read(layer: AttentionLayer) -> SourceLayer:
        layout = LayerLayout(finder, layer)
        tensors = {name: files.read(name) for name in layout.names}
        for name, array in tensors.items():
            if not np.isfinite(array).all():
                raise NonFiniteError(
                    f"tensor {name} holds NaN or Inf, which would spread to every merged head: "
                    "repair the checkpoint first"
                )
        return SourceLayer(layout, tensors, plan.limits[layer.module])

    with SourceFiles(plan.checkpoint) as files:
        yield read


def layout_of(plan: Plan, number: int) -> tuple[LayerLayout, int]:
    """Where the heads of a merged layer of a plan lie in the source, and how many K/V heads it is
    to have.
    """
    layer, groups = plan.merged_layers[number]
    return LayerLayout(_finder(plan), layer), groups


def _finder(plan: Plan) -> AttentionFinder:
    """The finder that a plan was made with."""
    kinds = [layer.attention_kind for layer in plan.layers]
    return AttentionFinder(plan.checkpoint, plan.family, encoder="encoder" in kinds)
