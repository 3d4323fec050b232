"""Watches how many rows of logits a computation makes at once."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestWith(TorchDispatchMode):  # type: ignore[misc]
    """Counts the rows of the largest tensor whose last dimension is the vocabulary.

    Args:
        vocabulary: V.
        hidden_size: rows of a transposed weight, which is not counted.
    """

    def __init__(self, vocabulary: int, hidden_size: int) -> None:
        super().__init__()
        self._shape, self.rows = (hidden_size, vocabulary), 0

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        found = function(*arguments, **(named or {}))
        for each in tree_leaves(found):
            if (
                isinstance(each, torch.Tensor)
                and each.shape != self._shape
                and each.shape[-1:] == self._shape[1:]
            ):
                self.rows = max(self.rows, each.numel() // self._shape[1])
        return found
