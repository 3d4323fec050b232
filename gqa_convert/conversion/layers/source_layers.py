"""Reads the attention layers of the source, one at a time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from gqa_convert.checkpoint.source_files import SourceFiles
from gqa_convert.conversion.plan import Plan
from gqa_convert.errors import NonFiniteError
from gqa_convert.families.geometry import AttentionFinder
from gqa_convert.merging.absorption_limits import AbsorptionLimits
from gqa_convert.merging.attention_heads import LayerLayout, Tensors


class SourceLayer(NamedTuple):
    """One attention layer of the source, in memory."""

    layout: LayerLayout
    tensors: Tensors
    limits: AbsorptionLimits


ReadLayer = Callable[[LayerLayout], SourceLayer]
"""Reads a layer of the source. It raises NonFiniteError where a tensor holds NaN or Inf."""


@contextmanager
def open_layers(plan: Plan) -> Iterator[ReadLayer]:
    """Open the weight files of a plan's source, a local checkpoint; yields what reads one layer."""

    def read(layout: LayerLayout) -> SourceLayer:
        tensors = {name: files.read(name) for name in layout.names}
        for name, array in tensors.items():
            if not np.isfinite(array).all():
                raise NonFiniteError(
                    f"tensor {name} holds NaN or Inf, which would spread to every merged head: "
                    "repair the checkpoint first"
                )
        return SourceLayer(layout, tensors, plan.limits[layout.layer.module])

    with SourceFiles(plan.checkpoint) as files:
        yield read


def layouts_of(plan: Plan) -> dict[str, LayerLayout]:
    """Where the heads of each layer of a plan lie in the source, by its module."""
    finder = AttentionFinder(plan.checkpoint, plan.family)
    return {layer.module: LayerLayout(finder, layer) for layer in plan.layers}
