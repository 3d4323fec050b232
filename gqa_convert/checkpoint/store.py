"""Where a checkpoint's files come from: a local folder here; `hub.py` adds a repository on the Hub with the same two
methods.
"""

import os
from pathlib import Path
from typing import NoReturn, Protocol

from gqa_convert.errors import CorruptCheckpointError


class FileStore(Protocol):
    """A set of files that can be read in pieces."""

    files: dict[str, int]
    """Path relative to the checkpoint, with forward slashes -> size in bytes."""

    folder: Path | None
    """The local folder that holds the files, or None if they are remote."""

    def read(self, name: str, start: int, length: int) -> bytes:
        """`length` bytes of a file from byte `start` on; fewer at the file's end."""
        ...


class FolderStore:
    """The files of a local folder, hidden ones and Python caches left out; links are followed, as the Hub's cache
    needs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder: Path | None = folder
        self.files: dict[str, int] = {}
        for root, folders, names in os.walk(folder, followlinks=True, onerror=_refuse):
            if Path(root).resolve() in (
                parent.resolve() for parent in Path(root).parents if parent.is_relative_to(folder)
            ):
                folders.clear()  # a link that leads back up
                continue
            folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
            for name in sorted(names):
                path = Path(root, name)
                if name.startswith("."):
                    continue
                if path.is_file():
                    _refuse_foreign_bytes(path.relative_to(folder).as_posix(), folder)
                    self.files[path.relative_to(folder).as_posix()] = path.stat().st_size
                elif path.is_symlink() and not path.exists():
                    raise CorruptCheckpointError(f"{path} is a link to nothing: download or copy the checkpoint again")

    def read(self, name: str, start: int, length: int) -> bytes:
        assert self.folder is not None
        try:
            with (self.folder / name).open("rb") as file:
                file.seek(start)
                return file.read(length)
        except OSError as problem:
            _refuse(problem)


def _refuse_foreign_bytes(name: str, folder: Path) -> None:
    """Records and indexes are UTF-8, and the Hub's names too."""
    if not is_utf8(name):
        raise CorruptCheckpointError(f"{folder} holds a file whose name is no UTF-8 ({name}): rename or remove it")


def is_utf8(name: str) -> bool:
    """Whether a name, as Python reads it from the system, is UTF-8 there."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _refuse(problem: OSError) -> NoReturn:
    raise CorruptCheckpointError(
        f"{problem.filename} can't be read ({problem.strerror}): check its permissions and the disk"
    ) from None
