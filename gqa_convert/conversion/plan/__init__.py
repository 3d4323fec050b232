"""From a checkpoint's config and tensor headers to a complete plan: every tensor of the result is
described before the first byte is written.

Everything that can be refused without reading weights is refused here. The plan holds no arrays and
needs no torch.
"""

from .layer_kv_heads import merging_counts, spread
from .making import make_plan
from .model import OutputFile, Plan, TensorChange

__all__ = ["OutputFile", "Plan", "TensorChange", "make_plan", "merging_counts", "spread"]
