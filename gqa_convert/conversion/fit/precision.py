"""The precision of the products that `fit` makes on calibration text."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from gqa_convert.conversion.plan import Plan
from gqa_convert.families.config_sizes import HIDDEN_SIZE_KEYS
from gqa_convert.families.context_length import stated_count

_WIDE = 256
"""The hidden_size from which on products take longer in float32 than the conversions between types."""
_HALF = ("F16", "BF16")

Precision = Callable[[], AbstractContextManager[Any]]
"""Returns a context in which torch multiplies matrices in one precision."""


def precision_of(plan: Plan, device: torch.device) -> Precision:
    """bfloat16 where it is faster on this device, the merged layers of the source have 16 bits, and their products are
    large enough to gain by it; otherwise the precision of the loaded model, float32.

    Args:
        plan: of the conversion.
        device: where the model runs.
    """
    changed = {change.name for change in plan.changes}
    dtypes = {entry.dtype for _, name, entry in plan.checkpoint.tensors() if name in changed}
    hidden_size = stated_count(plan.checkpoint.config, HIDDEN_SIZE_KEYS) or 0
    if dtypes <= set(_HALF) and hidden_size >= _WIDE and _is_fast(device):
        return partial(torch.autocast, device.type, torch.bfloat16)
    return nullcontext


def is_reduced(precision: Precision) -> bool:
    return precision is not nullcontext


def _is_fast(device: torch.device) -> bool:
    if device.type == "cpu":
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return device.type == "cuda" and bool(torch.cuda.is_bf16_supported(including_emulation=False))
