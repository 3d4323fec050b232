"""Turn a multi-head-attention checkpoint into a grouped-query one.

The public names below load on first use, so that importing the package costs nothing and never
imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gqa_convert._version import __version__

_MODULES = {
    "open_checkpoint": "gqa_convert.checkpoint.source",
    "Checkpoint": "gqa_convert.checkpoint.source",
    "make_plan": "gqa_convert.conversion.plan",
    "Plan": "gqa_convert.conversion.plan",
    "convert_checkpoint": "gqa_convert.conversion.run",
    "ConversionOptions": "gqa_convert.conversion.options",
    "CalibrationOptions": "gqa_convert.conversion.options",
    "inspect_checkpoint": "gqa_convert.measuring.sensitivity.inspection",
    "verify_checkpoint": "gqa_convert.verify",
    "GroupedQueryAttention": "gqa_convert.attention",
    "grouped_query_attention": "gqa_convert.attention",
    "KVCache": "gqa_convert.attention",
    "GQAConvertError": "gqa_convert.errors",
    "register_modeling": "gqa_convert.families.modeling",
    "uptrain_checkpoint": "gqa_convert.training.uptrain",
}
"""Where each public name is defined."""


__all__ = [
    "CalibrationOptions",
    "Checkpoint",
    "ConversionOptions",
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
    "register_modeling",
    "uptrain_checkpoint",
    "verify_checkpoint",
]

if TYPE_CHECKING:
    from gqa_convert.attention import GroupedQueryAttention, KVCache, grouped_query_attention
    from gqa_convert.checkpoint.source import Checkpoint, open_checkpoint
    from gqa_convert.conversion.options import CalibrationOptions, ConversionOptions
    from gqa_convert.conversion.plan import Plan, make_plan
    from gqa_convert.conversion.run import convert_checkpoint
    from gqa_convert.errors import GQAConvertError
    from gqa_convert.families.modeling import register_modeling
    from gqa_convert.measuring.sensitivity.inspection import inspect_checkpoint
    from gqa_convert.training.uptrain import uptrain_checkpoint
    from gqa_convert.verify import verify_checkpoint


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
