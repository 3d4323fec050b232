"""Keys and values of earlier tokens. The cache holds N heads, never H, which is the memory that
grouped-query attention saves.

Shape legend: b batch, N key/value heads, n tokens held, t new tokens, c head_dim, e head_dim of the
values, k keys and w features of a memory.
"""

from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from gqa_convert.errors import OptionError


class _MemoryRecord:
    """The state of a memory when the cache was filled from it, to notice another one.

    A tensor at another address is compared number by number. A tensor at the same address is the
    same one unless it was written to: torch counts writes, so that no number has to be read. It
    does not for inference tensors, of which the record keeps a copy.

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


class KVCache:
    """Keys and values of one layer, in buffers that double when they are full. For inference: no
    gradients flow through a cache.

    A cache serves either self-attention, where it grows with every call, or cross-attention, where
    it is filled from a memory once. Use one cache per layer and kind of attention, and fresh ones
    for every batch of sequences.

    Args:
        capacity: tokens to make room for at the first `append`; if the length is known, nothing is
            copied later.
    """

    def __init__(self, capacity: int = 0) -> None:
        self.length = 0
        """Tokens held."""
        self._capacity = capacity
        self._buffers: list[Tensor] = []
        """Keys and values; empty before the first token."""
        self._memory: list[_MemoryRecord] = []
        """Of what keys and of what values were projected; empty where they are not a memory's."""

    @property
    def holds_memory(self) -> bool:
        """Whether the keys and values are those of a memory, for cross-attention."""
        return bool(self._memory)

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append new tokens.

        Args:
            key: [b, N, t, c].
            value: [b, N, t, e].

        Returns:
            The keys [b, N, n + t, c] and values [b, N, n + t, e], views that are valid until the
            next `append` or `truncate`.

        Raises:
            OptionError: gradients are required, the shapes or types differ from those held, or the
                cache holds a memory.
        """
        if self._memory:
            raise OptionError(
                f"the cache holds a memory of {self.length} keys for cross-attention: "
                "use another cache for self-attention"
            )
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            raise OptionError(
                "the cache keeps no gradients: run under torch.no_grad(), or without a cache"
            )
        self._buffers = self._buffers or [key[:, :, :0], value[:, :, :0]]
        for buffer, new in zip(self._buffers, (key, value), strict=True):
            is_like = buffer[:, :, :0].shape == new[:, :, :0].shape
            if not is_like or buffer.dtype != new.dtype:
                raise OptionError(
                    f"the cache holds {list(buffer.shape)} of {buffer.dtype}, "
                    f"the new tokens are {list(new.shape)} of {new.dtype}"
                )
        # room for the new tokens
        length = self.length + key.shape[2]
        held = self._buffers[0].shape[2]
        # inference tensors cannot be written to outside inference mode, so they are copied there
        # like full buffers
        is_frozen = self._buffers[0].is_inference() and not torch.is_inference_mode_enabled()
        if length > held or is_frozen:
            size = max(length, 2 * held, self._capacity)
            self._buffers = [pad(buffer, (0, 0, 0, size - held)) for buffer in self._buffers]
        for buffer, new in zip(self._buffers, (key, value), strict=True):
            buffer[:, :, self.length : length] = new
        self.length = length
        return self.keys, self.values

    def fill(
        self, key: Tensor, value: Tensor, memory: Tensor, memory_values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Hold the keys and values of a memory, and remember which memory it was.

        Args:
            key: [b, N, t, c], projected from `memory`.
            value: [b, N, t, e], projected from `memory_values`.
            memory: the tensor that later calls pass to `check_memory`.
            memory_values: the same; may be `memory` itself.

        Returns:
            The keys and values held.

        Raises:
            OptionError: gradients are required, or the cache is in use.
        """
        if self.length:
            raise OptionError(
                f"the cache holds {self.length} keys already: use a fresh cache for a memory"
            )
        held = self.append(key, value)
        record = _MemoryRecord(memory)
        self._memory = [record, record if memory_values is memory else _MemoryRecord(memory_values)]
        return held

    def check_memory(self, memory: Tensor, memory_values: Tensor) -> None:
        """Check that the keys and values held are those of this memory.

        Raises:
            OptionError: they are not, or the memory has been written to since.
        """
        if not self._memory:
            raise OptionError(
                f"the cache holds {self.length} keys of self-attention, not of a memory: "
                "use one cache for each"
            )
        keys, values = self._memory
        if not (keys.matches(memory) and values.matches(memory_values)):
            raise OptionError(
                f"the cache holds {self.length} keys of another memory, "
                f"or this memory of {memory.shape[1]} keys was changed in place: "
                "use a fresh KVCache for each memory"
            )

    @property
    def keys(self) -> Tensor:
        """[b, N, n, c]."""
        return self._held(0)

    @property
    def values(self) -> Tensor:
        """[b, N, n, e]."""
        return self._held(1)

    def _held(self, which: int) -> Tensor:
        if not self._buffers:
            raise OptionError("the cache is empty: run the layer with it first")
        return self._buffers[which][:, :, : self.length]

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens held."""
        return self.keys.nbytes + self.values.nbytes if self._buffers else 0

    def truncate(self, length: int) -> None:
        """Drop all tokens from the `length`-th on, for example rejected speculative tokens. A
        memory is kept or dropped as a whole.

        Raises:
            OptionError: fewer tokens are held, or a memory would be cut.
        """
        if not 0 <= length <= self.length:
            raise OptionError(f"the cache holds {self.length} tokens and cannot be cut to {length}")
        if self._memory and 0 < length < self.length:
            raise OptionError(
                f"the cache holds a memory of {self.length} keys, which cannot be cut: "
                "use key_mask to hide a part of it"
            )
        self.length = length
        if length == 0:
            self._memory = []
