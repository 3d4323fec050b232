"""Reads the attention layers of the source, one at a time."""

from dataclasses import dataclass

import numpy as np

from gqa_convert.checkpoint.source_files import SourceFiles
from gqa_convert.conversion.plan import Plan
from gqa_convert.errors import NonFiniteError
from gqa_convert.families.geometry import AttentionFinder, AttentionLayer
from gqa_convert.merging.absorption_limits import AbsorptionLimits
from gqa_convert.merging.attention_heads import LayerLayout, Tensors


@dataclass(frozen=True, slots=True)
class SourceLayer:
    """One attention layer of the source, in memory."""

    layout: LayerLayout
    tensors: Tensors
    constraints: AbsorptionLimits


def read_source_layer(
    finder: AttentionFinder, layer: AttentionLayer, limits: AbsorptionLimits, files: SourceFiles
) -> SourceLayer:
    """Read one layer.

    Raises:
        NonFiniteError: a tensor holds NaN or Inf.
    """
    layout = LayerLayout(finder, layer)
    tensors = {name: files.read(name) for name in layout.names}
    for name, array in tensors.items():
        if not np.isfinite(array).all():
            raise NonFiniteError(
                f"tensor {name} holds NaN or Inf, which would spread to every merged head: repair the checkpoint first"
            )
    return SourceLayer(layout, tensors, limits)


def attention_of(plan: Plan) -> AttentionFinder:
    """The finder that a plan was made with."""
    return AttentionFinder(
        plan.checkpoint, plan.family, encoder=any(layer.attention_kind == "encoder" for layer in plan.layers)
    )
