"""How long the CPU's attention kernel takes in bfloat16 for a few rows of queries, in which processors differ: for a single
row it multiplies by vectors, which is several times as fast as two rows on some and several times as slow on others.
"""

import time
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
from torch.nn.functional import scaled_dot_product_attention

_KEYS, _HEAD_DIM, _REPETITIONS = 1024, 64, 5


@dataclass(frozen=True, slots=True)
class RowTimes:
    """Times of one K/V head, in any unit.

    Attributes:
        one: for one row.
        two: for a block of two.
        eight: for a block of eight.
    """

    one: float
    two: float
    eight: float

    def block(self, rows: int) -> float:
        """The time of a block of rows."""
        return self.one if rows == 1 else self.two + (rows - 2) * max(0.0, self.eight - self.two) / 6


ASSUMED: Final = RowTimes(one=3.0, two=1.0, eight=1.5)
"""Where nothing can be timed: so that rows are kept together."""


@cache
def bfloat16_times() -> RowTimes:
    """The times of this processor; the first call takes some milliseconds."""
    key, value = (torch.zeros(1, 1, _KEYS, _HEAD_DIM, dtype=torch.bfloat16) for _ in range(2))

    def seconds(rows: int) -> float:
        query = torch.zeros(1, 1, rows, _HEAD_DIM, dtype=torch.bfloat16)
        best = float("inf")
        for _ in range(_REPETITIONS):
            began = time.perf_counter()
            scaled_dot_product_attention(query, key, value)
            best = min(best, time.perf_counter() - began)
        return best

    with torch.inference_mode():
        return RowTimes(seconds(1), seconds(2), seconds(8))
