"""The lock that keeps a second job from using a run's output folder."""

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
        folder: the output folder; created with its parents if it does not exist.

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
                f"another process is training into {folder}: wait for it, or name another output; if it belongs to this job, the "
                "launcher started processes that do not know of one another"
            )

    def release(self) -> None:
        """Let another job use the folder. If the run was refused before it wrote anything, the files and folders that
        the lock created are removed.
        """
        if self._handle is None:
            return
        with contextlib.suppress(OSError):  # the folder may be gone or read-only by now
            if [each.name for each in self._path.parent.iterdir()] == [LOCK]:
                self._path.unlink()
                for each in self._made:
                    each.rmdir()
        os.close(self._handle)
        self._handle = None
