"""The files of a checkpoint in a local folder, and the protocol that `hub.py` implements for a repository on the Hub."""

import os
from pathlib import Path
from typing import NoReturn, Protocol

from gqa_convert.errors import CorruptCheckpointError


class CheckpointFiles(Protocol):
    """The files of a checkpoint, readable in byte ranges."""

    sizes: dict[str, int]
    """Size in bytes by path relative to the checkpoint, with forward slashes."""

    folder: Path | None
    """The local folder that holds the files, or None if they are remote."""

    def read(self, name: str, start: int, length: int) -> bytes:
        """Return `length` bytes of a file from byte `start`, or fewer at the end of the file."""
        ...


class LocalFiles:
    """The files of a local folder, without hidden files and Python caches.

    Links are followed, because the Hub's cache consists of links.
    """

    def __init__(self, folder: Path) -> None:
        self.folder: Path | None = folder
        self.sizes: dict[str, int] = {}
        for root, folders, names in os.walk(folder, followlinks=True, onerror=_refuse):
            if Path(root).resolve() in (
                parent.resolve() for parent in Path(root).parents if parent.is_relative_to(folder)
            ):
                folders.clear()  # the folder is a link to one of its parents
                continue
            folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
            for name in sorted(names):
                path = Path(root, name)
                if name.startswith("."):
                    continue
                if path.is_file():
                    _refuse_non_utf8(path.relative_to(folder).as_posix(), folder)
                    self.sizes[path.relative_to(folder).as_posix()] = path.stat().st_size
                elif path.is_symlink() and not path.exists():
                    raise CorruptCheckpointError(f"{path} is a broken link: download or copy the checkpoint again")

    def read(self, name: str, start: int, length: int) -> bytes:
        assert self.folder is not None
        try:
            with (self.folder / name).open("rb") as file:
                file.seek(start)
                return file.read(length)
        except OSError as problem:
            _refuse(problem)


def _refuse_non_utf8(name: str, folder: Path) -> None:
    """Raise CorruptCheckpointError for a name that records, indexes and the Hub, which use UTF-8, cannot hold."""
    if not is_utf8(name):
        raise CorruptCheckpointError(f"{folder} holds a file whose name is not UTF-8 ({name}): rename or remove it")


def is_utf8(name: str) -> bool:
    """Return whether a name that Python read from the operating system is valid UTF-8 there."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _refuse(problem: OSError) -> NoReturn:
    raise CorruptCheckpointError(
        f"{problem.filename} cannot be read ({problem.strerror}): check its permissions and the disk"
    ) from None
