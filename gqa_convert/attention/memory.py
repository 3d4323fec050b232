"""Records which memory a cross-attention cache was filled from, to notice another one.

Shape legend: b batch, k keys, w features of the memory.
"""

from typing import Any, Final, Self

import torch
from torch import Tensor

_BITS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SAMPLE: Final = 64
"""Bytes of each vector that are compared where torch does not count writes: one line of a processor's cache."""


class MemoryRecord:
    """A tensor's state when the cache was filled.

    A tensor at another address is compared number by number. A tensor at the same address is the same one unless it was
    written to. torch counts writes, so that no number has to be read, except for inference tensors. Of these the first
    numbers of each vector are compared, which costs little and notices a refilled buffer, but not every write to single
    numbers.

    Args:
        tensor: [b, k, w]. The record keeps it alive, so that no other tensor gets its address.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()
        counted = not tensor.is_inference()
        self._version = self._tensor._version if counted else None
        self._sample = None if counted else _sample(tensor).clone()

    def matches(self, tensor: Tensor) -> bool:
        """Whether a tensor holds the recorded numbers."""
        held = self._tensor
        if _layout(held) != _layout(tensor) or self._written_to():
            return False
        if held.data_ptr() == tensor.data_ptr() and held.stride() == tensor.stride():
            return True
        return bool(torch.equal(_bits(held), _bits(tensor)))

    def _written_to(self) -> bool:
        if self._sample is None:
            return bool(self._tensor._version != self._version)
        return not torch.equal(self._sample, _sample(self._tensor))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # a copy would have another address, and nothing changes a record


def _layout(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _bits(tensor: Tensor) -> Tensor:
    """The numbers as integers, so that NaN equals itself."""
    return tensor.view(_BITS[tensor.element_size()])


def _sample(tensor: Tensor) -> Tensor:
    return _bits(tensor)[..., : _SAMPLE // tensor.element_size()]
