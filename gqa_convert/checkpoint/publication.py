"""A folder that appears whole or not at all.

Work happens in a sibling of the result with a temporary name, under a lock that the kernel drops when the process dies. Publication
syncs everything and renames. The next run removes the leftovers of dead runs, and never those of a live one.
"""

import ctypes
import errno
import fcntl
import os
import secrets
import shutil
from pathlib import Path
from types import TracebackType

from gqa_convert.errors import OutputError

_MARK = ".gqa-convert-"
_MARKER = ".gqa-convert-unfinished"
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
_AT_FDCWD = -100


def check_destination(out: Path, source: Path | None, *, overwrite: bool) -> None:
    """Refuse a result folder that would lose or mix up files.

    Raises:
        OutputError: OUT exists (without `overwrite`), is no checkpoint folder, is the source, or one lies within the other.
    """
    real = out.resolve()
    if source is not None:
        origin = source.resolve()
        if real == origin:
            raise OutputError(f"{out} is the source itself: name another folder")
        if real.is_relative_to(origin):
            raise OutputError(f"{out} lies inside the source {source}: name a folder outside it")
        if origin.is_relative_to(real):
            raise OutputError(f"{out} contains the source {source}: name another folder")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise OutputError(f"{out} is a {'link' if out.is_symlink() else 'file'}: name a folder")
    if out.exists():
        if not overwrite:
            raise OutputError(f"{out} exists already: name a new folder, or replace it with --overwrite")
        if any(out.iterdir()) and not (out / "config.json").is_file():
            raise OutputError(f"{out} is no checkpoint (it has no config.json), so --overwrite leaves it alone: name a new folder")


def sweep(parent: Path) -> list[Path]:
    """Remove what dead runs left in a folder; returns what was removed."""
    removed = []
    for path in parent.glob(f".*{_MARK}*"):
        if path.is_symlink() or not path.is_dir():
            continue
        handle = _lock(path)
        if handle is None:
            continue  # a live run's
        try:
            if (path / _MARKER).is_file() or not any(path.iterdir()):
                shutil.rmtree(path)
                removed.append(path)
        finally:
            os.close(handle)
    return removed


def _lock(folder: Path) -> int | None:
    """An open descriptor that holds the folder's lock, or None if somebody else holds it or the folder is gone."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(handle).st_nlink and os.stat(folder).st_ino == os.fstat(handle).st_ino:
            return handle
    except OSError:
        pass
    os.close(handle)
    return None


class StagedFolder:
    """A context in which `path` is a new, locked, temporary sibling of `out`; leaving it without `publish` removes it."""

    def __init__(self, out: Path) -> None:
        self.out = Path(os.path.abspath(out))
        self._handle: int | None = None
        self.path = self.out

    def __enter__(self) -> "StagedFolder":
        try:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            while self._handle is None:  # a sweep may take the new folder before it is locked
                self.path = self.out.parent / f".{self.out.name}{_MARK}{secrets.token_hex(4)}"
                self.path.mkdir()
                self._handle = _lock(self.path)
            (self.path / _MARKER).touch()
        except OSError as problem:
            raise OutputError(f"{self.out.parent} can't be written to ({problem.strerror}): name another folder") from None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.path != self.out:
            shutil.rmtree(self.path, ignore_errors=True)
        if self._handle is not None:
            os.close(self._handle)

    def publish(self, *, overwrite: bool) -> None:
        """Give the folder its name, at once. Its files must be synced; the folders are synced here.

        Raises:
            OutputError: something has appeared at `out` meanwhile.
        """
        (self.path / _MARKER).unlink()
        for root, _, _ in os.walk(self.path):
            sync(Path(root))
        if overwrite and self.out.exists():
            self._replace()
        else:
            try:
                _rename(self.path, self.out, _RENAME_NOREPLACE)
            except FileExistsError:
                (self.path / _MARKER).touch()
                raise OutputError(f"{self.out} has appeared meanwhile: name a new folder, or replace it with --overwrite") from None
            self.path = self.out
        sync(self.out.parent)

    def _replace(self) -> None:
        """Exchange the two folders in one step, so that a complete one stands at `out` at every moment; the old one goes last."""
        _rename(self.path, self.out, _RENAME_EXCHANGE)
        old, self.path = self.path, self.out
        (old / _MARKER).touch()  # should this process die now, the next run removes it
        shutil.rmtree(old)


def _rename(old: Path, new: Path, flag: int) -> None:
    """Linux's renameat2; where the filesystem lacks it, the nearest that plain renames can do."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), flag) == 0:
        return
    code = ctypes.get_errno()
    if code not in (errno.EINVAL, errno.ENOSYS):
        raise OSError(code, os.strerror(code), str(new))
    if flag == _RENAME_NOREPLACE:
        if new.exists():
            raise FileExistsError(new)
        old.rename(new)
        return
    aside = old.with_name(old.name + "-old")
    new.rename(aside)
    old.rename(new)
    aside.rename(old)


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
