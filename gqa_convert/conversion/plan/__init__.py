"""From a checkpoint's config and tensor headers to a complete plan: every output byte is named before the first one is
written.

Everything that can be refused without reading weights is refused here. The plan holds no arrays and needs no torch.
"""

from gqa_convert.conversion.plan.group_counts import merging_counts, spread
from gqa_convert.conversion.plan.making import make_plan
from gqa_convert.conversion.plan.model import OutputShard, OutputTensor, Piece, Plan, TensorChange

__all__ = [
    "OutputShard",
    "OutputTensor",
    "Piece",
    "Plan",
    "TensorChange",
    "make_plan",
    "merging_counts",
    "spread",
]
