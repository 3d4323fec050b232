"""The precision of gradient steps."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_WIDE = 256
"""The hidden_size from which on products take longer in float32 than the conversions between types."""


def reduced_precision(device: torch.device, dtype: Any, hidden_size: int) -> AbstractContextManager[Any]:
    """A context in which torch multiplies matrices in bfloat16, where that is faster and the source has no more
    precision itself.

    Args:
        device: where the model runs.
        dtype: numpy's type of the source's weights.
        hidden_size: of the model.
    """
    if dtype.itemsize > 2 or hidden_size < _WIDE or not _is_fast(device):
        return nullcontext()
    context: AbstractContextManager[Any] = torch.autocast(device.type, torch.bfloat16)
    return context


def _is_fast(device: torch.device) -> bool:
    if device.type == "cpu":
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return device.type == "cuda" and bool(torch.cuda.is_bf16_supported(including_emulation=False))
