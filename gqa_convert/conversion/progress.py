"""What callers learn of the work on whole layers while it runs."""

from collections.abc import Callable
from dataclasses import dataclass

from gqa_convert.checkpoint.provenance import Divergence

from .layers.layer_store import LayerRecord

MERGING_LAYERS = "merging layers"
ALL_TOGETHER = "all layers together"
OWN_TEXT = "generating text"
LISTENING = "listening"
REWRITING = "rewriting the source"


@dataclass(frozen=True, slots=True)
class FitProgress:
    """Where the work is.

    Attributes:
        label: one of the constants above.
        done: merged layers, steps of the last stage, tokens, or bytes of a source in another form.
        detail: what is being done.
        layer: the layer that has just been merged.
        kl: of the last stage, once it has ended.
        note: for the user.
    """

    label: str
    done: int
    total: int
    detail: str = ""
    layer: LayerRecord | None = None
    kl: Divergence | None = None
    note: str | None = None


OnProgress = Callable[[FitProgress], None]
