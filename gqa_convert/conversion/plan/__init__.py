"""From a checkpoint's config and tensor headers to a complete plan: every tensor of the result is
described before the first byte is written.

Everything that can be refused without reading weights is refused here. The plan holds no arrays and
needs no torch.
"""

from gqa_convert.conversion.plan.layer_kv_heads import merging_counts, spread
from gqa_convert.conversion.plan.making import make_plan
from gqa_convert.conversion.plan.model import OutputFile, Plan, TensorChange

__all__ = [
    "OutputFile",
    "Plan",
    "TensorChange",
    "make_plan",
    "merging_counts",
    "spread",
]
