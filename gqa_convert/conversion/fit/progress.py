"""What callers learn of the work on whole layers while it runs."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from gqa_convert.checkpoint.provenance import Divergence
from gqa_convert.conversion.fit.layer_store import LayerRecord

MERGING_LAYERS: Final = "merging layers"
ALL_TOGETHER: Final = "all layers together"
OWN_TEXT: Final = "generating text"
LISTENING: Final = "listening"


class Stage(StrEnum):
    """The stages of fitting a layer on calibration data, in their order."""

    FORWARD = "running source and student"
    """From the attention module before to the layer's, over all batches."""
    STATISTICS = "statistics"
    HEAD_ORDER = "head order"
    LOW_FREQUENCY = "low-frequency pairs"
    REFIT = "refit"
    GRADIENT = "gradient steps"


@dataclass(frozen=True, slots=True)
class FitProgress:
    """Where the work is."""

    label: str
    """One of the constants above."""
    done: int
    """Merged layers, steps of the last stage, or tokens."""
    total: int
    detail: str = ""
    """What is being done."""
    layer: LayerRecord | None = None
    """The layer that has just been merged."""
    kl: Divergence | None = None
    """Of the last stage, once it has ended."""


OnProgress = Callable[[FitProgress], None]

OnStage = Callable[[Stage, int, int], None]
"""Called with the stage of one layer that is running, its steps done and all of them, 0 where they are not counted."""
