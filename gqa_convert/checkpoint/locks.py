"""Locks between processes (`flock`). The kernel drops a lock when its holder closes the file or dies."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

_NEW_FILE_MODE = 0o644


def try_lock(path: Path) -> int | None:
    """Lock a file without waiting; it is made where there is none.

    Returns:
        An open descriptor that holds the lock until it is closed, or None if another holder has it.

    Raises:
        OSError: the filesystem has no locks, or the file can't be opened.
    """
    while True:
        # opened for writing, since network filesystems lock nothing else
        handle = os.open(path, os.O_RDWR | os.O_CREAT, _NEW_FILE_MODE)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == os.fstat(handle).st_ino:
                    return handle
        except BlockingIOError:
            os.close(handle)
            return None
        except OSError:
            os.close(handle)
            raise
        os.close(handle)  # its last holder has removed the file meanwhile


@contextlib.contextmanager
def wait_for_lock(path: Path) -> Iterator[bool]:
    """A context that one process at a time is in.

    Yields:
        Whether the lock is held; some filesystems have no locks.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, _NEW_FILE_MODE)
    held = False
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
            held = True
        yield held
    finally:
        os.close(handle)
