"""The lock that keeps a second job out of a run's output folder."""

import contextlib
import os
from pathlib import Path

from gqa_convert.checkpoint.locks import try_lock
from gqa_convert.errors import LaunchError

LOCK = ".lock"
"""The file in the output folder that a run holds locked."""


class OutputLock:
    """Holds an output folder for one job until it is released or the process ends.

    Args:
        folder: made if it does not exist, with the folders above it.

    Raises:
        LaunchError: another process holds it.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._made = [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        self._handle = try_lock(self._path)
        if self._handle is None:
            raise LaunchError(
                f"another process is training into {folder}: wait for it, or name another output; if it is part of this very job, the "
                "launcher started processes that do not know of one another"
            )

    def release(self) -> None:
        """Let another job use the folder. If the run was refused before it wrote anything, what the lock made is
        removed.
        """
        if self._handle is None:
            return
        with contextlib.suppress(OSError):  # the folder may be gone, or can't be written any more
            if [each.name for each in self._path.parent.iterdir()] == [LOCK]:
                self._path.unlink()
                for each in self._made:
                    each.rmdir()
        os.close(self._handle)
        self._handle = None
