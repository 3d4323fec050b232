"""Which numbers of groups fit a number of heads."""

from collections.abc import Sequence
from math import gcd


def merging_counts(*kv_heads: int) -> list[int]:
    """Every N that merges, or keeps, the K/V heads of all layers evenly, rising.

    Args:
        kv_heads: K/V heads of the source; several numbers where layers differ.
    """
    return [count for count in range(1, max(kv_heads) + 1) if gcd(*kv_heads) % count == 0]


def repeating_counts(kv_heads: int, heads: int) -> list[int]:
    """Every N above the source's count that repeats K/V heads evenly, rising.

    Args:
        kv_heads: K/V heads of the source.
        heads: its query heads.
    """
    return [count for count in range(2 * kv_heads, heads + 1, kv_heads) if heads % count == 0]


def spread(counts: Sequence[int], most: int) -> list[int]:
    """At most so many of the counts, evenly spread, the first and the last among them."""
    chosen = min(most, len(counts))
    return [counts[round(place * (len(counts) - 1) / max(1, chosen - 1))] for place in range(chosen)]
