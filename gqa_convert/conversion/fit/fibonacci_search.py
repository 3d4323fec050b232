"""Finds the number with the least error where every error is expensive."""

from collections.abc import Callable

import numpy as np

_DENT = 2
"""The number of steps over which the error may rise before it falls further."""


def least(error: Callable[[int], float], count: int) -> int:
    """The number from 0 to `count` with the least error, by a Fibonacci search.

    The error must fall towards one point and rise behind it, except for dents of up to `_DENT` numbers, which a local
    search at the end crosses. Each step of the search needs one more error.
    """
    seen: dict[int, float] = {}

    def at(number: int) -> float:
        if number not in seen:
            seen[number] = error(number) if number <= count else np.inf
        return seen[number]

    low, short, long = 0, 1, 2
    while short + long < count:
        short, long = long, short + long
    # the range is [low, low + short + long]
    while short + long > 3:
        left, right = low + short, low + long
        if right > count or at(left) < at(right):
            short, long = long - short, short
        else:
            low += short
            short, long = long - short, short
    best = min(range(low, min(low + short + long, count) + 1), key=at)
    while (better := min(range(max(0, best - _DENT), min(best + _DENT, count) + 1), key=at)) != best:
        best = better
    return best
