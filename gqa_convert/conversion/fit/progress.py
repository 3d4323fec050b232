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
REWRITING: Final = "rewriting the source"


@dataclass(frozen=True, slots=True)
class FitProgress:
    """Where the work is."""

    label: str
    """One of the constants above."""
    done: int
    """Merged layers, steps of the last stage, tokens, or bytes of a source in another form."""
    total: int
    detail: str = ""
    """What is being done."""
    layer: LayerRecord | None = None
    """The layer that has just been merged."""
    kl: Divergence | None = None
    """Of the last stage, once it has ended."""
    note: str | None = None
    """For the user."""


OnProgress = Callable[[FitProgress], None]
