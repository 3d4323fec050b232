"""Locks between processes (`flock`). The kernel drops a lock when its holder closes the file or
dies.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


def try_lock(path: Path) -> int | None:
    """Lock a file without waiting; it is made where there is none.

    Returns:
        An open descriptor that holds the lock until it is closed, or None if another holder has it.

    Raises:
        OSError: the filesystem has no locks, or the file can't be opened.
    """
    while True:
        # opened for writing, since network filesystems lock nothing else
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, handle)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            with contextlib.suppress(
                FileNotFoundError
            ):  # its last holder has removed the file meanwhile
                if path.stat().st_ino == os.fstat(handle).st_ino:
                    stack.pop_all()
                    return handle


@contextlib.contextmanager
def wait_for_lock(path: Path) -> Iterator[None]:
    """A context that one process at a time is in, where the filesystem has locks."""
    with path.open("ab") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
