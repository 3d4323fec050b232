"""Write large files past the page cache: the disk takes the bytes from the source's pages, or from a small buffer.

Copying a byte range through the page cache costs processor time for memory, for the copy itself and for the later
writing. Here the source is mapped, and several threads hand its pages to the disk while the caller merges heads. The
result does not stay in the page cache.
"""

import errno
import mmap
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

from gqa_convert.checkpoint.copying import OutputFile, Progress, SourceFile
from gqa_convert.checkpoint.shared_blocks import BLOCK

_SMALLEST = 16 << 20
"""Bytes. Smaller files are written through the page cache: they take no time, and their readers find them there."""

_THREADS = 4
_STEP = 4 << 20
"""Bytes per request. With `_THREADS` of them under way, the disks measured were busy all the time (docs/log.md)."""

_QUEUED = 32
"""Requests that wait for the disk at most, so that the places that are read lie close together."""

_BUFFER, _BUFFERS = 1 << 20, 3
"""Bytes of a buffer for numbers in memory and for places that do not fit the disk's blocks, and how many there are."""

_REFUSED = (errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP, errno.ENOTBLK)
"""What a filesystem answers that cannot write from here past the cache; also pages that cannot be read any more."""


def is_large(size: int) -> bool:
    """Return whether a file of `size` bytes is worth writing past the page cache."""
    return size >= _SMALLEST


def new_output_file(path: str | os.PathLike[str], size: int, progress: Progress) -> "OutputFile | DirectOutputFile":
    """Create a file that is written from front to back, past the page cache where that is possible and worth it.

    Args:
        path: a path that does not exist.
        size: final size in bytes; 0 where blocks are shared with the source, so that little is written.
        progress: called with the number of bytes after every step.
    """
    out = OutputFile(path, size, progress)
    if not is_large(size) or not out.reserved or not hasattr(os, "O_DIRECT"):
        return out
    try:
        direct = os.open(path, os.O_WRONLY | os.O_DIRECT)
    except OSError:  # this filesystem always uses the page cache
        return out
    return DirectOutputFile(out.fd, direct, progress)


class DirectOutputFile:
    """A new file whose space is reserved, written from front to back in whole blocks.

    Args:
        fd: the file, open for reading and writing.
        direct: the same file, open with O_DIRECT.
        progress: called with the number of bytes after every step.
    """

    def __init__(self, fd: int, direct: int, progress: Progress) -> None:
        self.at = 0
        self._fd, self._direct = fd, direct
        self._progress = progress
        self._threads = ThreadPoolExecutor(_THREADS)
        self._waiting: deque[Future[None]] = deque()
        self._free: SimpleQueue[memoryview] = SimpleQueue()
        for _ in range(_BUFFERS):
            self._free.put(memoryview(mmap.mmap(-1, _BUFFER)))
        self._buffer = self._free.get()
        self._filled = 0
        """Bytes in the buffer, the last ones before `at`; they begin at a whole block of the file."""

    def write(self, data: memoryview | bytes) -> None:
        """Append bytes."""
        view = memoryview(data)
        while view:
            done = min(len(view), _BUFFER - self._filled)
            self._buffer[self._filled : self._filled + done] = view[:done]
            self._advance(done)
            view = view[done:]

    def copy(self, source: SourceFile, start: int, nbytes: int) -> None:
        """Append a byte range of another file.

        Raises:
            CorruptCheckpointError: the source ends too early, for example because it was truncated during the copy.
            OSError: reading or writing failed.
        """
        if start + nbytes > os.fstat(source.fd).st_size:
            raise source.ended()
        if start % BLOCK == self.at % BLOCK:
            edge = min(nbytes, -start % BLOCK)
            self._copy_to_buffer(source, start, edge)
            start, nbytes = start + edge, nbytes - edge
            if nbytes >= _BUFFER:
                self._send_buffer()
            while nbytes >= _BUFFER:
                step = min(_STEP, nbytes // BLOCK * BLOCK)
                self._send(self._write_mapped, source, start, self.at, step)
                self.at += step
                self._progress(step)
                start, nbytes = start + step, nbytes - step
        self._copy_to_buffer(source, start, nbytes)

    def close(self) -> None:
        """Wait until all bytes are on the disk, then close the file."""
        try:
            while self._waiting:
                self._waiting.popleft().result()
            _write_all(self._fd, self._buffer[: self._filled], self.at - self._filled)
            os.fsync(self._fd)  # what the disk has not stored yet, and the file's size and blocks
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the file without syncing it; the caller discards it."""
        self._threads.shutdown(cancel_futures=True)
        os.close(self._direct)
        os.close(self._fd)

    def _copy_to_buffer(self, source: SourceFile, start: int, nbytes: int) -> None:
        while nbytes:
            done = min(nbytes, _BUFFER - self._filled)
            source.read_into(self._buffer[self._filled : self._filled + done], start)
            self._advance(done)
            start, nbytes = start + done, nbytes - done

    def _advance(self, nbytes: int) -> None:
        self.at += nbytes
        self._filled += nbytes
        self._progress(nbytes)
        if self._filled == _BUFFER:
            self._send_buffer()

    def _send_buffer(self) -> None:
        """Have the whole blocks of the buffer written; all of them are whole."""
        if self._filled:
            self._send(self._write_buffer, self._buffer, self._filled, self.at - self._filled)
            self._buffer, self._filled = self._free.get(), 0

    def _send(self, work: Callable[..., None], *arguments: Any) -> None:
        self._waiting.append(self._threads.submit(work, *arguments))
        if len(self._waiting) > _QUEUED:
            self._waiting.popleft().result()

    def _write_buffer(self, buffer: memoryview, nbytes: int, at: int) -> None:
        try:
            if not self._write_direct(buffer[:nbytes], at):
                _write_all(self._fd, buffer[:nbytes], at)
        finally:
            self._free.put(buffer)

    def _write_mapped(self, source: SourceFile, start: int, at: int, nbytes: int) -> None:
        if not self._write_direct(source.pages()[start : start + nbytes], at):
            block = memoryview(bytearray(nbytes))  # reading reports what is wrong with the source, if anything is
            source.read_into(block, start)
            _write_all(self._fd, block, at)

    def _write_direct(self, view: memoryview, at: int) -> bool:
        """Write whole blocks past the page cache; return False, with an unknown part of them written, if refused."""
        while view:
            try:
                done = os.pwritev(self._direct, [view], at)
            except OSError as problem:
                if problem.errno not in _REFUSED:
                    raise
                return False
            if done % BLOCK:
                return False
            view, at = view[done:], at + done
        return True


def _write_all(fd: int, view: memoryview, at: int) -> None:
    while view:
        done = os.pwrite(fd, view, at)
        view, at = view[done:], at + done
