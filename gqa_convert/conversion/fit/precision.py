"""The precision of the products that `fit` makes on calibration text."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from gqa_convert.conversion.fit.limits import may_be_reduced
from gqa_convert.conversion.plan import Plan

Precision = Callable[[], AbstractContextManager[Any]]
"""Returns a context in which torch multiplies matrices in one precision."""


def precision_of(plan: Plan, device: torch.device) -> Precision:
    """bfloat16 where it is faster on this device and the merged layers of the source have no more precision; otherwise
    the precision of the loaded model, float32.

    Args:
        plan: of the conversion.
        device: where the model runs.
    """
    if may_be_reduced(plan) and _is_fast(device):
        return partial(torch.autocast, device.type, torch.bfloat16)
    return nullcontext


def is_reduced(precision: Precision) -> bool:
    return precision is not nullcontext


def _is_fast(device: torch.device) -> bool:
    if device.type == "cpu":
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return device.type == "cuda" and bool(torch.cuda.is_bf16_supported(including_emulation=False))
