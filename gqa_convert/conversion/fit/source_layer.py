"""Reads the attention layers of the source, one at a time."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from gqa_convert.checkpoint.dtypes import DTYPES
from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.checkpoint.source_files import SourceFiles
from gqa_convert.conversion.plan import Plan
from gqa_convert.errors import NonFiniteError
from gqa_convert.families.geometry import AttentionFinder, AttentionLayer
from gqa_convert.merging.absorption_limits import AbsorptionLimits
from gqa_convert.merging.attention_heads import LayerLayout, Tensors


class SourceReader:
    """Reads a checkpoint's tensors whole, by name.

    Args:
        checkpoint: a local one.
        files: its weight files.
    """

    def __init__(self, checkpoint: Checkpoint, files: SourceFiles) -> None:
        self._files = files
        self._targets = {name: (number, entry) for number, name, entry in checkpoint.tensors()}

    def __call__(self, name: str) -> Any:
        """The tensor, in the type of the file.

        Raises:
            NonFiniteError: it holds NaN or Inf.
        """
        number, entry = self._targets[name]
        block = np.empty(entry.nbytes, np.uint8)
        self._files[number].read_into(block.data, entry.start)
        array = block.view(DTYPES[entry.dtype]).reshape(entry.shape)
        if not np.isfinite(array).all():
            raise NonFiniteError(
                f"tensor {name} holds NaN or Inf, which would spread to every merged head: repair the checkpoint first"
            )
        return array


@dataclass(frozen=True, slots=True)
class SourceLayer:
    """One attention layer of the source, in memory."""

    layout: LayerLayout
    tensors: Tensors
    constraints: AbsorptionLimits


def read_source_layer(
    finder: AttentionFinder, layer: AttentionLayer, limits: AbsorptionLimits, read: SourceReader
) -> SourceLayer:
    """Read one layer.

    Raises:
        NonFiniteError: a tensor holds NaN or Inf.
    """
    layout = LayerLayout(finder, layer)
    return SourceLayer(layout, {name: read(name) for name in layout.names}, limits)


def attention_of(plan: Plan) -> AttentionFinder:
    """The finder that a plan was made with."""
    return AttentionFinder(
        plan.checkpoint, plan.family, encoder=any(layer.attention_kind == "encoder" for layer in plan.layers)
    )
