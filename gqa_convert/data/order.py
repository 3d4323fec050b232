"""Maps sample numbers to sources and blocks by pure integer functions.

They are identical on every machine and in every version of NumPy.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
T = TypeVar("T")
_LONGEST_PERIOD = 1 << 16
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
        high, low, high_size, low_size = (
            number >> low_bits,
            number & (1 << low_bits) - 1,
            bits - low_bits,
            low_bits,
        )
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


class Mixture:
    """An endless order of sources: for every n, the number of times a source is chosen in n samples
    differs from n times its weight by less than one.

    The order repeats after as many samples as the weights' common denominator, so that any position
    is found in constant time. Weights with a denominator above 65536 are rounded to multiples of
    1/65536.

    Attributes:
        parts: the smallest whole numbers in the proportion of the weights.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(str(weight)) for weight in weights]
        shares = [weight / sum(exact) for weight in exact]
        period = min(math.lcm(*(share.denominator for share in shares)), _LONGEST_PERIOD)
        parts = [max(1, round(share * period)) for share in shares]
        self.parts = [part // math.gcd(*parts) for part in parts]
        self._order = _spread(self.parts)

    def locate(self, index: int) -> tuple[int, int]:
        """The source of a sample, and the number of earlier samples from that source."""
        turns, place = divmod(index, len(self._order))
        source, turn = self._order[place]
        return source, turns * self.parts[source] + turn


def _spread(parts: list[int]) -> list[tuple[int, int]]:
    """One period of the order: the source at each position, and the number of earlier positions
    with that source.

    Turn m of a source with share w is released at position floor(m / w) and due before ceil((m + 1)
    / w). Choosing the earliest deadline first meets all deadlines, as in the scheduling of periodic
    unit tasks on one processor, which bounds the error by one.
    """
    period = sum(parts)
    turns = [0] * len(parts)
    order = []
    for place in range(period):
        released = [
            each for each, part in enumerate(parts) if turns[each] * period // part <= place
        ]
        chosen = min(released, key=lambda each: -(-(turns[each] + 1) * period // parts[each]))
        order.append((chosen, turns[chosen]))
        turns[chosen] += 1
    return order
