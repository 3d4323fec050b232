"""Where a causal model's windows lie on a text: every token but the first of a document is predicted once."""

from collections.abc import Sequence
from typing import NamedTuple


class Window(NamedTuple):
    """Consecutive tokens that a model reads at once.

    Attributes:
        start: place of the first in the text.
        length: how many it reads; each predicts the token after it.
        skip: how many of the first predictions an earlier window has made already.
    """

    start: int
    length: int
    skip: int


def cut_windows(documents: Sequence[tuple[int, int]], context: int, stride: int) -> list[Window]:
    """Windows that predict each token of each document, but the first, once: with a context as long as the windows
    allow.

    The first window of a document predicts as many tokens as it reads, each further one the `stride` tokens that are
    new to it.

    Args:
        documents: where each begins and ends in the text.
        context: tokens that a window reads, at most.
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
    """Numbers of windows in batches, those of equal length together: what is too large for the memory comes first, and
    little is padded.
    """
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    return [order[first : first + batch] for first in range(0, len(order), batch)]
