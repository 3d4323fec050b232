"""Random numbers and orders by pure integer functions.

They are identical on every machine and in every version of NumPy.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
T = TypeVar("T")
_ROUNDS = 8
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """A 64-bit hash of integers (splitmix64, chained)."""
    state = 0
    for number in numbers:
        state = (state ^ (number & _MASK)) + _GOLDEN & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


def permuted(number: int, size: int, key: int) -> int:
    """The image of a number under a pseudorandom permutation of 0..size-1: a Feistel network over
    the next power of two, with cycle walking.

    Args:
        number: 0 <= number < size.
        size: the size of the permutation.
        key: selects the permutation.
    """
    if size < 2:
        return number
    bits = max(2, (size - 1).bit_length())
    low_bits = bits // 2
    while True:
        high = number >> low_bits
        low = number & (1 << low_bits) - 1
        high_size = bits - low_bits
        low_size = low_bits
        for round_key in _round_keys(key):
            high, low = low, high ^ mix(round_key, low) & (1 << high_size) - 1
            high_size, low_size = low_size, high_size
        number = high << low_size | low
        if number < size:
            return number


@lru_cache(64)
def _round_keys(key: int) -> list[int]:
    return [mix(key, round_number) for round_number in range(_ROUNDS)]


def shuffled(items: Sequence[T], key: int) -> list[T]:
    """The items in the order that a key selects; see `permuted`."""
    return [items[permuted(place, len(items), key)] for place in range(len(items))]
