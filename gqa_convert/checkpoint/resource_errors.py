"""Which errors mean that the memory or the disk is full."""

import errno
from pathlib import Path

from gqa_convert.errors import NoSpaceError

_NO_MEMORY_SIGNS = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
"""In the messages of torch's RuntimeErrors."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FULL_SIGNS = ("No space left", "quota exceeded", "File too large")
"""The same in the messages of libraries that report no errno (safetensors, torch's checkpoints)."""


def is_out_of_memory(problem: BaseException) -> bool:
    """Whether an error means that a GPU's or the machine's memory is full."""
    return (
        isinstance(problem, MemoryError)
        or type(problem).__name__ == "OutOfMemoryError"
        or (
            isinstance(problem, RuntimeError)
            and any(sign in str(problem) for sign in _NO_MEMORY_SIGNS)
        )
    )


def is_disk_full(problem: BaseException) -> bool:
    """Whether an error means that a disk, a quota or the largest file size is exhausted."""
    return getattr(problem, "errno", None) in _FULL or any(
        sign in str(problem) for sign in _FULL_SIGNS
    )


def no_space(place: Path, again: str) -> NoSpaceError:
    """The error about a full disk.

    Args:
        place: the file or folder that was written.
        again: what the same command does when it is run again, such as "resumes from the last checkpoint".
    """
    return NoSpaceError(
        f"the disk or quota of {place} is full: make room and run the same command again, which {again}"
    )
