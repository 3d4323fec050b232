"""The merge error of each tensor, as the provenance record states it."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gqa_convert.verify.exact.merges import BLOCK


@dataclass
class MergeError:
    """|heads - merged head| / |heads| over all heads of a tensor."""

    squared_error: float = 0.0
    squared_norm: float = 0.0

    def add(self, heads: Iterable[Any], merged: Any) -> None:
        """Add the heads of one group and the stored merged head that replaces them."""
        wide_merged = [block.double() for block in merged.reshape(-1).split(BLOCK)]
        for head in heads:
            for block, other in zip(head.reshape(-1).split(BLOCK), wide_merged, strict=True):
                wide = block.double()
                self.squared_norm += float(wide.dot(wide))
                wide = wide - other if wide.data_ptr() == block.data_ptr() else wide.sub_(other)
                self.squared_error += float(wide.dot(wide))

    def value(self) -> float:
        """The error; 0 where all heads are zero."""
        return math.sqrt(self.squared_error / self.squared_norm) if self.squared_norm else 0.0


class MergeErrors:
    """The merge errors of several tensors."""

    def __init__(self) -> None:
        self._errors: dict[str, MergeError] = {}

    def add(self, name: str, heads: Iterable[Any], merged: Any) -> None:
        """Add the heads of one group of tensor `name`."""
        self._errors.setdefault(name, MergeError()).add(heads, merged)

    def values(self) -> dict[str, float]:
        """The errors by tensor."""
        return {name: error.value() for name, error in self._errors.items()}
