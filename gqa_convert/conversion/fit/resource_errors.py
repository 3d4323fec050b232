"""What the system says about the memory or the disk while layers are fitted, as one line."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gqa_convert.errors import DeviceMemoryError, NoSpaceError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MEMORY = ("out of memory", "can't allocate memory")


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Translate errors.

    Args:
        folder: where activations and merged layers are kept.

    Raises:
        NoSpaceError: the disk is full.
        DeviceMemoryError: the memory of the GPU or of the machine does not suffice.
    """
    again = "and run the same command again, which goes on from the layers that are done"
    try:
        yield
    except OSError as problem:
        if problem.errno not in _FULL:
            raise
        raise NoSpaceError(
            f"the disk or quota of {folder} is full, where the activations of the calibration text are kept: make room or lower "
            f"--calibration-tokens, {again}"
        ) from None
    except (MemoryError, RuntimeError) as problem:
        if not isinstance(problem, MemoryError) and not any(sign in str(problem) for sign in _MEMORY):
            raise
        raise DeviceMemoryError(
            f"out of memory: lower --calibration-length, or let nothing else run on the GPU or hide it with CUDA_VISIBLE_DEVICES=, {again}"
        ) from None
