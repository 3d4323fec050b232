"""Which memory a cache of cross-attention was filled from, so that another one is noticed.

Shape legend: b batch, k keys, w width of the memory.
"""

from typing import Any, Final, Self

import torch
from torch import Tensor

_BITS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SAMPLE: Final = 64
"""Bytes of each key's vector that are compared where torch counts no writes: one line of a processor's cache."""


class MemoryRecord:
    """A tensor as it was when the cache was filled.

    A tensor at another address is compared number by number. One at the same address is the same tensor, unless it was
    written to: torch counts the writes, so that no number has to be read. It does not count writes to inference
    tensors: there, the front of each vector is compared, which costs little and notices that a buffer was filled anew,
    but not every write to a few single numbers.

    Args:
        tensor: [b, k, w]. It is kept alive, so that its address is not given to another tensor.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()
        counted = not tensor.is_inference()
        self._version = self._tensor._version if counted else None
        self._sample = None if counted else _sample(tensor).clone()

    def matches(self, tensor: Tensor) -> bool:
        """Whether the tensor holds the recorded numbers."""
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
