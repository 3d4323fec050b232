"""Byte ranges from file to file inside the kernel, with shared blocks where the filesystem has them.

Source and output are both walked from front to back, so that the disk can be kept busy: bytes are asked for before they
are needed, and, while the source comes from memory anyway, sent to the disk as soon as they are written, which leaves
little for the final sync to wait for. While the disk is reading they are not: one disk is slower when it has to do both
at once.
"""

import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Callable
from pathlib import Path

from gqa_convert.errors import CorruptCheckpointError

BLOCK = 4096
"""Bytes; filesystems that share blocks do so at this grain or a divisor of it."""

_STEP = 32 << 20
"""Bytes asked for in one call: enough to make the calls' cost vanish, few enough for a smooth progress bar."""

_READ_AHEAD = 256 << 20
"""Bytes; chosen among noisy runs (docs/log.md), in which shorter ones were no better."""

_FICLONERANGE = 0x4020940D
_SYNC_FILE_RANGE_WRITE = 2
_UNSUPPORTED = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM, errno.ETXTBSY)

_libc = ctypes.CDLL(None, use_errno=True)

Progress = Callable[[int], None]


class SourceFile:
    """A file that is read roughly from front to back.

    Args:
        path: the file.
        read_ahead: ask the kernel for bytes before they are needed; of no use where blocks are shared instead of read.
    """

    def __init__(self, path: str | os.PathLike[str], *, read_ahead: bool = True) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self.fd).st_size
        self._advised = 0 if read_ahead and hasattr(os, "posix_fadvise") else self.size
        self.cached = True
        """Whether the bytes being read were in memory already, so that the disk is free to write meanwhile."""

    def close(self) -> None:
        os.close(self.fd)

    def expect(self, start: int) -> None:
        """Say that reading has reached byte `start`, so that what follows is fetched in time."""
        if self._advised < min(start + _READ_AHEAD, self.size):
            begin = max(start, self._advised)
            self._advised = min(start + 2 * _READ_AHEAD, self.size)
            self.cached = all(
                self._is_cached(place) for place in (begin, (begin + self._advised) // 2, self._advised - 1)
            )
            os.posix_fadvise(self.fd, begin, self._advised - begin, os.POSIX_FADV_WILLNEED)

    def _is_cached(self, place: int) -> bool:
        try:
            return os.preadv(self.fd, [bytearray(1)], place, os.RWF_NOWAIT) == 1
        except OSError:  # EAGAIN: not in memory; others: nobody can tell
            return False

    def read_into(self, view: memoryview, start: int) -> None:
        """Fill `view` from byte `start` on.

        Raises:
            CorruptCheckpointError: the file ends too early.
        """
        while view:
            done = os.preadv(self.fd, [view], start)
            if done == 0:
                raise self.ended()
            view, start = view[done:], start + done

    def ended(self) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{self.path} became shorter while it was read: copy it again and leave it alone meanwhile"
        )


class OutputFile:
    """A new file that is written from front to back.

    Args:
        path: must not exist.
        size: bytes it will have; the space is reserved at once where the filesystem can.
        progress: called with the number of bytes of every step.
    """

    def __init__(self, path: str | os.PathLike[str], size: int, progress: Progress) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        self.at = 0
        self.eager = True
        """Whether to send bytes to the disk as soon as they are written, rather than when the kernel sees fit."""
        self._progress = progress
        self._sent = 0
        self._in_kernel = hasattr(os, "copy_file_range")
        self._buffer = bytearray()
        if size and hasattr(_libc, "fallocate"):
            result = _libc.fallocate(self.fd, 0, ctypes.c_int64(0), ctypes.c_int64(size))
            if result != 0 and ctypes.get_errno() == errno.ENOSPC:
                os.close(self.fd)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def write(self, data: memoryview | bytes) -> None:
        """Append bytes."""
        view = memoryview(data)
        while view:
            done = os.pwrite(self.fd, view, self.at)
            view = view[done:]
            self._advance(done)

    def copy(self, source: SourceFile, start: int, nbytes: int) -> None:
        """Append a byte range of another file.

        Raises:
            CorruptCheckpointError: the source ends too early, as when it is truncated meanwhile.
            OSError: reading or writing failed.
        """
        edge = min(nbytes, -start % BLOCK)
        if edge and start % BLOCK == self.at % BLOCK and nbytes > BLOCK:  # blocks can only be shared from an edge on
            done = self._step(source, start, edge)
            start, nbytes = start + done, nbytes - done
        while nbytes:
            source.expect(start)
            self.eager = source.cached
            done = self._step(source, start, min(_STEP, nbytes))
            start, nbytes = start + done, nbytes - done

    def close(self) -> None:
        """Wait until everything is on the disk, then close."""
        try:
            os.fsync(self.fd)
        finally:
            os.close(self.fd)

    def abandon(self) -> None:
        """Close a file that nobody will want."""
        os.close(self.fd)

    def _step(self, source: SourceFile, start: int, nbytes: int) -> int:
        done = 0
        if self._in_kernel:
            try:
                done = os.copy_file_range(source.fd, self.fd, nbytes, start, self.at)
            except OSError as problem:
                if problem.errno not in _UNSUPPORTED:
                    raise
                self._in_kernel = False
        if not self._in_kernel:
            if not self._buffer:
                self._buffer = bytearray(1 << 20)
            view = memoryview(self._buffer)[: min(nbytes, len(self._buffer))]
            done = os.preadv(source.fd, [view], start)
            self.write(view[:done])
        elif done:
            self._advance(done)
        if done == 0:
            raise source.ended()
        return done

    def _advance(self, nbytes: int) -> None:
        self.at += nbytes
        self._progress(nbytes)
        if self.eager and self.at - self._sent >= _STEP and hasattr(_libc, "sync_file_range"):
            span = (ctypes.c_int64(self._sent), ctypes.c_int64(self.at - self._sent))
            _libc.sync_file_range(self.fd, *span, _SYNC_FILE_RANGE_WRITE)  # starts writing and returns; only a hint
            self._sent = self.at


def can_share_blocks(path: str | os.PathLike[str], scratch: int) -> bool:
    """Whether the filesystem lets a file and the open, empty file `scratch` share blocks (XFS, btrfs, bcachefs)."""
    if Path(path).stat().st_size < BLOCK:
        return False
    source = os.open(path, os.O_RDONLY)
    try:
        fcntl.ioctl(scratch, _FICLONERANGE, struct.pack("=qQQQ", source, 0, BLOCK, 0))
    except OSError:
        return False
    finally:
        os.close(source)
    return True
