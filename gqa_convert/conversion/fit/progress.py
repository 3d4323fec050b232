"""What callers learn of the work on whole layers while it runs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gqa_convert.checkpoint.provenance import Divergence
from gqa_convert.conversion.fit.layer_store import LayerRecord

MERGING_LAYERS: Final = "merging layers"
ALL_TOGETHER: Final = "all layers together"
OWN_TEXT: Final = "generating text"
LISTENING: Final = "listening"


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


class LayerReport:
    """Reports the work on layers, one after the other.

    Args:
        on_progress: called with each report.
        total: the number of layers.
    """

    def __init__(self, on_progress: OnProgress, total: int) -> None:
        self._on_progress, self._done, self._total = on_progress, 0, total

    def stage(self, name: str, step: int = 0, steps: int = 0) -> None:
        """A stage of the next layer, with its steps done and all of them where they are counted."""
        counted = f" {step:,} of {steps:,}" if steps else ""
        detail = f"layer {self._done + 1}: {name}{counted}"
        self._on_progress(FitProgress(MERGING_LAYERS, self._done, self._total, detail))

    def merged(self, record: LayerRecord | None) -> None:
        """A layer is merged."""
        self._done += 1
        self._on_progress(FitProgress(MERGING_LAYERS, self._done, self._total, layer=record))
