"""Records which memory a cross-attention cache was filled from, to notice another one.

Shape legend: b batch, k keys, w features of the memory.
"""

from typing import Any, Self

import torch
from torch import Tensor


class MemoryRecord:
    """A tensor's state when the cache was filled.

    A tensor at another address is compared number by number. A tensor at the same address is the same one unless it was
    written to: torch counts writes, so that no number has to be read. It does not for inference tensors, of which the
    record keeps a copy.

    Args:
        tensor: [b, k, w]. The record keeps it alive, so that no other tensor gets its address.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.clone() if tensor.is_inference() else tensor.detach()
        self._version = None if tensor.is_inference() else self._tensor._version

    def matches(self, tensor: Tensor) -> bool:
        """Whether a tensor holds the recorded numbers."""
        held = self._tensor
        if (held.shape, held.dtype, held.device) != (tensor.shape, tensor.dtype, tensor.device):
            return False
        if self._version is not None and held._version != self._version:
            return False
        is_same = held.data_ptr() == tensor.data_ptr() and held.stride() == tensor.stride()
        return is_same or bool(torch.equal(held, tensor))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # a copy would have another address, and nothing changes a record
