"""Copy byte ranges from file to file inside the kernel, sharing disk blocks where the filesystem supports it.

Source and output are both walked from front to back. Bytes are requested before they are needed. While the source is
in the page cache, written bytes are also sent to the disk at once, so that the final sync has little to wait for; while
the disk is reading they are not, because one disk is slower when it reads and writes at the same time.
"""

import ctypes
import errno
import mmap
import os
from collections.abc import Callable

from gqa_convert.checkpoint.shared_blocks import BLOCK
from gqa_convert.errors import CorruptCheckpointError

_STEP = 32 << 20
"""Bytes copied per call: large enough to amortise the call, small enough for a smooth progress bar."""

_READ_AHEAD = 256 << 20
"""Bytes. Chosen from noisy runs (docs/log.md) in which shorter distances were no better."""

_SYNC_FILE_RANGE_WRITE = 2
_UNSUPPORTED = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM, errno.ETXTBSY)

_libc = ctypes.CDLL(None, use_errno=True)

Progress = Callable[[int], None]


class SourceFile:
    """A file that is read roughly from front to back.

    Args:
        path: the file.
        read_ahead: ask the kernel for bytes before they are needed; useless where blocks are shared instead of read.
    """

    def __init__(self, path: str | os.PathLike[str], *, read_ahead: bool = True) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self.fd).st_size
        self._advised = 0 if read_ahead and hasattr(os, "posix_fadvise") else self.size
        self._pages: memoryview | None = None
        self.cached = True
        """Whether the bytes being read were in the page cache already, so that the disk is free to write."""

    def close(self) -> None:
        self._pages = None
        os.close(self.fd)

    def pages(self) -> memoryview:
        """The whole file, mapped. Only the kernel may touch it, which answers EFAULT where the file ends too early."""
        if self._pages is None:
            self._pages = memoryview(mmap.mmap(self.fd, 0, prot=mmap.PROT_READ))
        return self._pages

    def expect(self, start: int) -> None:
        """Announce that reading has reached byte `start`, so that the kernel fetches what follows in time."""
        if self._advised < min(start + _READ_AHEAD, self.size):
            begin = max(start, self._advised)
            self._advised = min(start + 2 * _READ_AHEAD, self.size)
            self.cached = all(
                self._is_cached(offset) for offset in (begin, (begin + self._advised) // 2, self._advised - 1)
            )
            os.posix_fadvise(self.fd, begin, self._advised - begin, os.POSIX_FADV_WILLNEED)

    def _is_cached(self, offset: int) -> bool:
        try:
            return os.preadv(self.fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
        except OSError:  # EAGAIN means not cached; other errors leave it unknown
            return False

    def read_into(self, view: memoryview, start: int) -> None:
        """Fill `view` with the bytes from `start`.

        Raises:
            CorruptCheckpointError: the file ends too early.
        """
        while view:
            done = os.preadv(self.fd, [view], start)
            if done == 0:
                raise self.ended()
            view, start = view[done:], start + done

    def ended(self) -> CorruptCheckpointError:
        """Return the error for a file that is shorter than its header says."""
        return CorruptCheckpointError(
            f"{self.path} became shorter while it was being read: copy it again, and do not write to it during a conversion"
        )


class OutputFile:
    """A new file that is written from front to back.

    Args:
        path: a path that does not exist.
        size: final size in bytes; the space is reserved at once where the filesystem supports it.
        progress: called with the number of bytes after every step.
    """

    def __init__(self, path: str | os.PathLike[str], size: int, progress: Progress) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        self.at = 0
        self.eager = True
        """Whether to send bytes to the disk as soon as they are written instead of when the kernel decides to."""
        self._progress = progress
        self._sent = 0
        self._in_kernel = hasattr(os, "copy_file_range")
        self._buffer = bytearray()
        self.reserved = False
        """Whether the file has its final size and its space on the disk already."""
        if size and hasattr(_libc, "fallocate"):
            result = _libc.fallocate(self.fd, 0, ctypes.c_int64(0), ctypes.c_int64(size))
            if result != 0 and ctypes.get_errno() == errno.ENOSPC:
                os.close(self.fd)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            self.reserved = result == 0

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
            CorruptCheckpointError: the source ends too early, for example because it was truncated during the copy.
            OSError: reading or writing failed.
        """
        edge = min(nbytes, -start % BLOCK)
        if edge and start % BLOCK == self.at % BLOCK and nbytes > BLOCK:  # only whole blocks can be shared
            done = self._step(source, start, edge)
            start, nbytes = start + done, nbytes - done
        while nbytes:
            source.expect(start)
            self.eager = source.cached
            done = self._step(source, start, min(_STEP, nbytes))
            start, nbytes = start + done, nbytes - done

    def close(self) -> None:
        """Wait until all bytes are on the disk, then close the file."""
        try:
            os.fsync(self.fd)
        finally:
            os.close(self.fd)

    def abandon(self) -> None:
        """Close the file without syncing it; the caller discards it."""
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
            _libc.sync_file_range(self.fd, *span, _SYNC_FILE_RANGE_WRITE)  # a hint: it starts the write and returns
            self._sent = self.at
