"""Out-of-memory errors of torch in one line."""

from collections.abc import Iterator
from contextlib import contextmanager

from gqa_convert.checkpoint.resource_errors import is_out_of_memory
from gqa_convert.errors import DeviceMemoryError


@contextmanager
def memory_explained(name: str, advice: str) -> Iterator[None]:
    """A context that turns out-of-memory errors into a single line: what ran, and what to do.

    Raises:
        DeviceMemoryError: the memory is full.
    """
    try:
        yield
    except Exception as problem:
        if is_out_of_memory(problem):
            raise DeviceMemoryError(f"out of memory with {name}: {advice}") from None
        raise
