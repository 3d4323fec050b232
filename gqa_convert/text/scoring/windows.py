"""Divides a text into windows for a causal model, which predict every token except the first of a document once."""

from collections.abc import Sequence
from typing import NamedTuple


class Window(NamedTuple):
    """Consecutive tokens that a model reads in one forward pass.

    Attributes:
        start: the position of its first token in the text.
        length: the number of tokens read; each predicts the next one.
        skip: the number of leading predictions that an earlier window has already made.
    """

    start: int
    length: int
    skip: int


def cut_windows(documents: Sequence[tuple[int, int]], context: int, stride: int) -> list[Window]:
    """Windows that predict each token of each document except the first exactly once, with the longest context that the
    window length allows.

    The first window of a document predicts as many tokens as it reads, each later one predicts its `stride` new tokens.

    Args:
        documents: the beginning and the end of each document in the text.
        context: the most tokens that a window reads.
        stride: tokens between the beginnings of a document's windows, from 1 to `context`.
    """
    if not 1 <= stride <= context:
        raise ValueError(f"a stride of {stride} does not fit windows of {context} tokens")
    found = []
    for begin, end in documents:
        count, start, done = end - begin - 1, 0, 0
        while done < count:
            length = min(context, count - start)
            found.append(Window(begin + start, length, done - start))
            done = start + length
            start += stride
    return found


def longest_first(lengths: Sequence[int], batch: int) -> list[list[int]]:
    """Window numbers in batches, longest windows first: memory runs out at the beginning if at all, and little padding
    is needed.
    """
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    return [order[first : first + batch] for first in range(0, len(order), batch)]
