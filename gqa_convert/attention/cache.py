"""Keys and values of earlier tokens. The cache holds N heads, never H, which is the memory that
grouped-query attention saves.

Shape legend: b batch, N key/value heads, n tokens held, t new tokens, c head_dim, e head_dim of the
values.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from gqa_convert.errors import OptionError


class KVCache:
    """Keys and values of one layer, in buffers that double when they are full. For inference: no
    gradients flow through a cache.

    It grows with every call. Use one cache per layer, and fresh ones for every batch of sequences.

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

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append new tokens.

        Args:
            key: [b, N, t, c].
            value: [b, N, t, e].

        Returns:
            The keys [b, N, n + t, c] and values [b, N, n + t, e], views that are valid until the
            next `append`.

        Raises:
            OptionError: gradients are required, or the shapes or types differ from those held.
        """
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
