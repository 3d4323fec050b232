"""Keys and values of tokens seen before. N heads are held, never H: that is what grouped-query attention is for.

Shape legend: b batch, N key/value heads, n tokens held, t new tokens, c head width, e head width of the values.
"""

import torch
from torch import Tensor

from gqa_convert.errors import OptionError


class KVCache:
    """Keys and values of one layer, in buffers that double when they are full. For inference: nothing here carries gradients.

    Args:
        capacity: tokens to make room for at the first `append`; known lengths need no copy later.
    """

    def __init__(self, capacity: int = 0) -> None:
        self.length = 0
        """Tokens held."""
        self._capacity = capacity
        self._buffers: tuple[Tensor, Tensor] | None = None

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add new tokens behind those held.

        Args:
            key: [b, N, t, c].
            value: [b, N, t, e].

        Returns:
            The keys [b, N, n + t, c] and values [b, N, n + t, e], views that are valid until the next `append` or `truncate`.

        Raises:
            OptionError: a gradient is asked for, or the shapes or types differ from those held.
        """
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            raise OptionError("the cache keeps no gradients: run under torch.no_grad(), or without a cache")
        length = self.length + key.shape[2]
        if self._buffers is None or length > self._buffers[0].shape[2]:
            self._grow(key, value, length)
        assert self._buffers is not None
        for buffer, new in zip(self._buffers, (key, value), strict=True):
            if (buffer.shape[:2], buffer.shape[3], buffer.dtype) != (new.shape[:2], new.shape[3], new.dtype):
                raise OptionError(
                    f"the cache holds {list(buffer.shape)} of {buffer.dtype}, the new tokens are {list(new.shape)} of {new.dtype}"
                )
            buffer[:, :, self.length : length] = new
        self.length = length
        return self.keys, self.values

    def _grow(self, key: Tensor, value: Tensor, length: int) -> None:
        held = self._buffers
        size = max(length, self._capacity) if held is None else max(length, 2 * held[0].shape[2])
        if held is None:
            self._buffers = (key.new_empty(*key.shape[:2], size, key.shape[3]), value.new_empty(*value.shape[:2], size, value.shape[3]))
            return
        grown = tuple(buffer.new_empty(*buffer.shape[:2], size, buffer.shape[3]) for buffer in held)
        for new, old in zip(grown, held, strict=True):
            new[:, :, : self.length] = old[:, :, : self.length]
        self._buffers = (grown[0], grown[1])

    @property
    def keys(self) -> Tensor:
        """[b, N, n, c]."""
        return self._held(0)

    @property
    def values(self) -> Tensor:
        """[b, N, n, e]."""
        return self._held(1)

    def _held(self, which: int) -> Tensor:
        if self._buffers is None:
            raise OptionError("the cache is empty: run the layer with it first")
        return self._buffers[which][:, :, : self.length]

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens held."""
        return 0 if self._buffers is None else self.keys.nbytes + self.values.nbytes

    def truncate(self, length: int) -> None:
        """Forget all tokens from the `length`-th on, as when a speculated continuation is rejected.

        Raises:
            OptionError: fewer tokens are held.
        """
        if not 0 <= length <= self.length:
            raise OptionError(f"the cache holds {self.length} tokens and cannot be cut to {length}")
        self.length = length
