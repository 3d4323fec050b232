"""The C library's heap: whether freed memory stays with the process."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

_LIBC = ctypes.CDLL(None)
_TRIM: Final = getattr(_LIBC, "malloc_trim", None)
_MALLOPT: Final = getattr(_LIBC, "mallopt", None)
"""Functions of glibc; None with other C libraries."""
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_NEVER, _USUAL_TRIM, _USUAL_MAPS = (1 << 31) - 1, 64 << 20, 65536
"""The trim threshold that keeps everything; the one that glibc adjusts itself to where large blocks are freed, and its
default of `M_MMAP_MAX`.
"""


@contextmanager
def kept_heap(device: Any) -> Iterator[None]:
    """A context of steps that allocate and free the same large tensors again and again: freed memory stays with the
    process until the end. Otherwise glibc returns each large block to the kernel, which clears the pages of the next
    one. The heap grows by what lies between its holes. Without glibc nothing changes.

    Args:
        device: a torch device. Tensors of GPUs do not come from this heap.
    """
    if _MALLOPT is None or device.type != "cpu":
        yield
        return
    _MALLOPT(_M_MMAP_MAX, 0)
    _MALLOPT(_M_TRIM_THRESHOLD, _NEVER)
    try:
        yield
    finally:
        _MALLOPT(_M_TRIM_THRESHOLD, _USUAL_TRIM)
        _MALLOPT(_M_MMAP_MAX, _USUAL_MAPS)
        trim_heap()


def trim_heap() -> None:
    """Return freed memory to the system, which glibc otherwise keeps in part."""
    if _TRIM is not None:
        _TRIM(0)
