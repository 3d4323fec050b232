"""Turn a multi-head-attention checkpoint into a grouped-query one.

The public names below load on first use, so that importing the package costs nothing and never imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "open_checkpoint": "gqa_convert.checkpoint.source",
    "Checkpoint": "gqa_convert.checkpoint.source",
    "make_plan": "gqa_convert.plan",
    "Plan": "gqa_convert.plan",
    "convert_checkpoint": "gqa_convert.convert",
    "inspect_checkpoint": "gqa_convert.inspecting.inspection",
    "verify_checkpoint": "gqa_convert.verify",
    "GroupedQueryAttention": "gqa_convert.attention",
    "grouped_query_attention": "gqa_convert.attention",
    "KVCache": "gqa_convert.attention",
    "GQAConvertError": "gqa_convert.errors",
}

__all__ = [
    "Checkpoint",
    "GQAConvertError",
    "GroupedQueryAttention",
    "KVCache",
    "Plan",
    "__version__",
    "convert_checkpoint",
    "grouped_query_attention",
    "inspect_checkpoint",
    "make_plan",
    "open_checkpoint",
    "verify_checkpoint",
]

if TYPE_CHECKING:
    from gqa_convert.attention import GroupedQueryAttention, KVCache, grouped_query_attention
    from gqa_convert.checkpoint.source import Checkpoint, open_checkpoint
    from gqa_convert.convert import convert_checkpoint
    from gqa_convert.errors import GQAConvertError
    from gqa_convert.inspecting.inspection import inspect_checkpoint
    from gqa_convert.plan import Plan, make_plan
    from gqa_convert.verify import verify_checkpoint


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
