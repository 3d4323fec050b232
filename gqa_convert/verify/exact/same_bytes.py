"""Compares ranges of two files by reading both into buffers that a core's cache holds.

Comparing mapped files takes up to twice as long: their pages must be mapped, and pass through the cache only to be compared.
"""

import os
from collections.abc import Callable

from gqa_convert.verify.checkpoint_reader import ByteRange

_BLOCK = 256 << 10
"""Bytes of each file that are compared at a time."""
_STEP = 64 << 20
"""Bytes after which progress is reported."""


def same_bytes(ours: ByteRange, theirs: ByteRange, progress: Callable[[int], None]) -> bool:
    """Whether two ranges hold the same bytes.

    Args:
        ours: of a file.
        theirs: of another.
        progress: called with the number of bytes compared since the last call. A difference takes back what was
            reported, because the caller looks for it from the beginning.

    Raises:
        OSError: a file cannot be read.
    """
    if ours.nbytes != theirs.nbytes:
        return False
    files = [os.open(each.path, os.O_RDONLY) for each in (ours, theirs)]
    try:
        size = min(_BLOCK, ours.nbytes)
        left, right = bytearray(size), bytearray(size)
        reported = 0
        for at in range(0, ours.nbytes, max(1, size)):
            count = min(size, ours.nbytes - at)
            if count < size:
                del left[count:], right[count:]
            read = os.preadv(files[0], [left], ours.start + at), os.preadv(files[1], [right], theirs.start + at)
            if read != (count, count) or left != right:
                progress(-reported)
                return False
            if at + count - reported >= _STEP:
                progress(at + count - reported)
                reported = at + count
        progress(ours.nbytes - reported)
    finally:
        for file in files:
            os.close(file)
    return True
