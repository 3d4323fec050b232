"""Measures what a conversion costs and gains: losses on text, the cost of merging before it is
done, decode time.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gqa_convert.errors import DeviceMemoryError, is_out_of_memory

Progress = Callable[[str, int, int], None]
"""Called with the name of a stage, the steps done and the number of steps."""
StageProgress = Callable[[int, int], None]
"""Called with the steps of a stage that are done, and their number."""


def no_progress(*_: object) -> None:
    """Shows nothing."""


@contextmanager
def memory_explained(name: str, advice: str) -> Iterator[None]:
    """A context that turns out-of-memory errors of torch into a single line: what ran, and what to
    do.

    Raises:
        DeviceMemoryError: the memory is full.
    """
    try:
        yield
    except Exception as problem:
        if is_out_of_memory(problem):
            raise DeviceMemoryError(f"out of memory with {name}: {advice}") from None
        raise
