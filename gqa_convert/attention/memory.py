"""Which memory a cache of cross-attention was filled from, so that another one is noticed."""

from typing import Any, Self

import torch
from torch import Tensor


class MemoryRecord:
    """A tensor as it was when the cache was filled.

    The same storage at the same version is the same memory: torch counts the writes to a tensor, so that no number has to be read. Other
    tensors are compared number by number. Writes to inference tensors are not counted: of these a copy is kept, and is always compared.

    Args:
        tensor: of any shape. It is kept alive, so that its storage is not given to another tensor.
    """

    def __init__(self, tensor: Tensor) -> None:
        counted = not tensor.is_inference()
        self._tensor = tensor.detach() if counted else tensor.clone()
        self._version = self._tensor._version if counted else None

    def matches(self, tensor: Tensor) -> bool:
        """Whether the tensor holds the recorded numbers."""
        held = self._tensor
        if _layout(held) != _layout(tensor):
            return False
        if self._version is not None:
            if held._version != self._version:
                return False
            if held.data_ptr() == tensor.data_ptr() and held.stride() == tensor.stride():
                return True
        return bool(torch.equal(held, tensor))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # a copy would have another storage, and nothing changes a record


def _layout(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device
