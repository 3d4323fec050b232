"""Byte ranges from file to file inside the kernel, with shared blocks where the filesystem has them."""

import errno
import fcntl
import os
import struct
from collections.abc import Callable

BLOCK = 4096
"""Bytes; filesystems that share blocks do so at this grain or a divisor of it."""

_STEP = 32 << 20
"""Bytes asked for in one call: enough to make the calls' cost vanish, few enough for a smooth progress bar."""

_READ_AHEAD = 64 << 20

_FICLONERANGE = 0x4020940D
_UNSUPPORTED = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM, errno.ETXTBSY)

Progress = Callable[[int], None]


class RangeCopier:
    """Copies byte ranges between files; falls back to a reused buffer where the kernel can't.

    Args:
        progress: called with the number of bytes of every step.
        read_ahead: ask the kernel to fetch the bytes behind the current step, which pays whenever they are really read.
    """

    def __init__(self, progress: Progress, *, read_ahead: bool = True) -> None:
        self._progress = progress
        self._read_ahead = read_ahead
        self._in_kernel = hasattr(os, "copy_file_range")
        self._buffer = bytearray()

    def copy(self, source: int, start: int, destination: int, at: int, nbytes: int) -> None:
        """Copy `nbytes` from offset `start` of one open file to offset `at` of another.

        Raises:
            EOFError: the source ends too early, as when it is truncated meanwhile.
            OSError: reading or writing failed.
        """
        end = start + nbytes
        edge = min(nbytes, -start % BLOCK)
        if edge and start % BLOCK == at % BLOCK and nbytes > BLOCK:  # blocks can only be shared from an edge on
            self._step(source, start, destination, at, edge)
            start, at = start + edge, at + edge
        advised = start
        while start < end:
            if self._read_ahead and advised < end and start + _READ_AHEAD > advised:
                ahead = min(end, start + 2 * _READ_AHEAD) - advised
                os.posix_fadvise(source, advised, ahead, os.POSIX_FADV_WILLNEED)
                advised += ahead
            done = self._step(source, start, destination, at, min(_STEP, end - start))
            start, at = start + done, at + done

    def _step(self, source: int, start: int, destination: int, at: int, nbytes: int) -> int:
        done = 0
        if self._in_kernel:
            try:
                done = os.copy_file_range(source, destination, nbytes, start, at)
            except OSError as problem:
                if problem.errno not in _UNSUPPORTED:
                    raise
                self._in_kernel = False
        if not self._in_kernel:
            if not self._buffer:
                self._buffer = bytearray(4 << 20)
            view = memoryview(self._buffer)[: min(nbytes, len(self._buffer))]
            done = os.preadv(source, [view], start)
            write_all(destination, view[:done], at)
        if done == 0:
            raise EOFError(f"the source ended {nbytes} bytes too early")
        self._progress(done)
        return done


def write_all(file: int, data: memoryview | bytes, at: int) -> None:
    """Write all of `data` at an offset; a single system call may write less."""
    view = memoryview(data)
    while view:
        done = os.pwrite(file, view, at)
        view, at = view[done:], at + done


def read_exactly(file: int, view: memoryview, start: int) -> None:
    """Fill `view` from an offset.

    Raises:
        EOFError: the file ends too early.
    """
    while view:
        done = os.preadv(file, [view], start)
        if done == 0:
            raise EOFError(f"the source ended {len(view)} bytes too early")
        view, start = view[done:], start + done


def can_share_blocks(source: int, scratch: int) -> bool:
    """Whether the two files' filesystem lets them share blocks (XFS, btrfs, bcachefs, OCFS2); writes one block to `scratch`."""
    if os.fstat(source).st_size < BLOCK:
        return False
    try:
        fcntl.ioctl(scratch, _FICLONERANGE, struct.pack("=qQQQ", source, 0, BLOCK, 0))
    except OSError:
        return False
    return True
