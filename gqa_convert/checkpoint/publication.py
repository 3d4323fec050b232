"""Publish a folder atomically: it appears whole or not at all.

The work happens in a temporary sibling of the result. A lock file beside it, whose lock the kernel drops when the
process dies, says that the run lives. Publication syncs the folders and renames the sibling. The next run removes what
dead runs left, and never what belongs to a live one.
"""

import ctypes
import errno
import os
import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from gqa_convert.checkpoint.atomic_files import sync
from gqa_convert.checkpoint.files import is_utf8
from gqa_convert.checkpoint.locks import try_lock
from gqa_convert.checkpoint.ownership import foreign_files, some
from gqa_convert.checkpoint.resource_errors import is_disk_full
from gqa_convert.errors import GQAConvertError, NoSpaceError, OutputError

_LOCK = re.compile(r"\.(?P<out>.+)\.gqa-convert-[0-9a-f]{8}\.lock")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
"""How an address such as s3://bucket/name begins, as the first part of a path."""
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def check_destination(out: Path, source: Path | None, *, overwrite: bool) -> None:
    """Refuse a result folder in which files would be lost or mixed. An empty folder is accepted.

    Raises:
        OutputError: `out` holds a result (without `overwrite`) or files that this program did not write; it is a file,
            a link, a mount point or the current folder; it is the source, or one lies within the other.
    """
    if not is_utf8(str(out)):
        raise OutputError(f"the path {out} is not UTF-8, so that records cannot hold it: name another folder")
    if out.parts and _SCHEME.fullmatch(out.parts[0]) and not out.exists():
        raise OutputError(
            f"{out} is an address, and results are written to folders: name a folder, and upload it with the store's own client"
        )
    try:
        real = Path(os.path.realpath(out))
        if source is not None:
            _check_apart(out, real, source)
        if out.is_symlink():
            raise OutputError(f"{out} is a link: name the folder itself or another folder")
        if out.exists():
            _check_replaceable(out, real, overwrite)
    except OSError as problem:
        raise _explained(problem, out) from None


def _check_apart(out: Path, real: Path, source: Path) -> None:
    origin = source.resolve()
    if real == origin:
        raise OutputError(f"{out} is the source itself: name another folder")
    if real.is_relative_to(origin):
        raise OutputError(f"{out} lies inside the source {source}: name a folder outside it")
    if origin.is_relative_to(real):
        raise OutputError(f"{out} contains the source {source}: name another folder")
    if out.is_dir() and any(path.is_symlink() and path.resolve().is_relative_to(real) for path in source.rglob("*")):
        raise OutputError(f"{out} contains files that the source {source} links to: name another folder")


def _check_replaceable(out: Path, real: Path, overwrite: bool) -> None:
    if not real.is_dir():
        raise OutputError(f"{out} is a file: name a folder")
    if foreign := foreign_files(real):
        what = f"files that gqa-convert did not write or that were changed or copied there later ({some(foreign)})"
        raise OutputError(f"{out} exists already and holds {what}: name a new folder, or move them away")
    if any(real.iterdir()) and not overwrite:
        raise OutputError(f"{out} exists already: name a new folder, or replace it with --overwrite")
    if os.path.ismount(real):
        raise OutputError(f"{out} is a mount point, which cannot be replaced as a whole: name a new folder in it")
    with suppress(FileNotFoundError):  # the current folder was deleted
        if Path.cwd().resolve().is_relative_to(real):
            raise OutputError(
                f"{out} is the current folder or contains it, so that it cannot be replaced: change to another folder, or name a new one"
            )


def sweep(parent: Path) -> list[Path]:
    """Remove what dead runs left in a folder, as far as permissions allow, and return the removed folders."""
    removed = []
    for lock in sorted(parent.glob(".*.lock")):
        match = _LOCK.fullmatch(lock.name)
        if match is None:
            continue
        with suppress(OSError):  # there are no locks here, or the files belong to somebody else
            handle = try_lock(lock, create=False)
            if handle is None:
                continue  # a live run holds it
            try:
                removed += _remove_leftovers(lock.with_suffix(""), parent / match["out"])
                lock.unlink()
            finally:
                os.close(handle)
    return removed


def _remove_leftovers(folder: Path, out: Path) -> list[Path]:
    """Remove a dead run's folders. If it died before it published its own result, the earlier one gets its name back."""
    aside = _aside(folder)
    if aside.is_dir() and not out.exists():
        aside.rename(out)
    removed = [path for path in (folder, aside) if path.is_dir()]
    for path in removed:
        shutil.rmtree(path)
    return removed


def _aside(folder: Path) -> Path:
    """Where a run puts the earlier result while its own takes the name, on a filesystem that cannot exchange the two."""
    return folder.with_name(f"{folder.name}-old")


class StagedFolder:
    """A context manager that makes `path`, a new, locked, temporary sibling of `out`, after a sweep.

    Leaving the context without calling `publish` removes it. An OSError that leaves the context becomes a NoSpaceError
    or an OutputError.
    """

    def __init__(self, out: Path) -> None:
        self.out = Path(os.path.realpath(out))
        self.path = self.out.with_name(f".{self.out.name}.gqa-convert-{secrets.token_hex(4)}")
        self._lock = self.path.with_name(f"{self.path.name}.lock")
        self._handle: int | None = None
        self._new_parents = [parent for parent in self.out.parents if not parent.exists()]

    def __enter__(self) -> "StagedFolder":
        try:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            sweep(self.out.parent)
            with suppress(OSError):  # the filesystem has no locks; there, `sweep` removes nothing either
                while self._handle is None:  # another process's sweep has it for a moment
                    self._handle = try_lock(self._lock)
            self.path.mkdir()
        except BaseException as problem:
            self.__exit__(type(problem), problem, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):
            self._lock.unlink()
        with suppress(OSError):  # they hold the result
            for parent in self._new_parents:
                parent.rmdir()
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
        if isinstance(error, OSError):
            raise _explained(error, self.out) from error

    def publish(self, *, overwrite: bool) -> None:
        """Give the folder its final name in one step. Its files must be synced already; folders are synced here.

        Raises:
            OutputError: another file or folder has appeared at `out`.
        """
        for root, _, _ in os.walk(self.path):
            sync(Path(root))
        check_destination(self.out, None, overwrite=overwrite)
        if self.out.exists() and any(self.out.iterdir()):
            self._replace()
            return
        try:
            self.path.rename(self.out)  # succeeds only if there is nothing, or an empty folder
        except OSError as problem:
            if problem.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
            raise OutputError(
                f"{self.out} was created by another process during the run: name a new folder, or replace it with --overwrite"
            ) from None
        self._confirm()

    def _replace(self) -> None:
        """Take the name of the earlier result and remove that, unless files have appeared in it since the check.

        Where the filesystem can, the two folders are exchanged in one step, so that `out` is complete at every moment.
        """
        is_exchange = _exchange(self.path, self.out)
        earlier = self.path if is_exchange else _aside(self.path)
        try:
            if not is_exchange:
                self.out.rename(earlier)
            if foreign := foreign_files(earlier):
                raise OutputError(
                    f"{self.out} received new files during the run ({some(foreign)}): move them away, or name a new folder"
                )
            if not is_exchange:
                self.path.rename(self.out)
        except BaseException:
            if is_exchange:
                _exchange(self.path, self.out)
            elif earlier.exists():
                earlier.rename(self.out)
            raise
        self._confirm()
        shutil.rmtree(earlier, ignore_errors=True)

    def _confirm(self) -> None:
        """Wait until the new name is on the disk."""
        try:
            sync(self.out.parent)
        except OSError as problem:
            raise OutputError(
                f"{self.out} is complete, but the disk has not confirmed its name ({problem.strerror}): check the disk"
            ) from None


def _explained(problem: OSError, out: Path) -> GQAConvertError:
    """Turn an error of the operating system into one line."""
    if is_disk_full(problem):
        return NoSpaceError(
            f"the disk or quota of {out.parent} is full and nothing was written: free some space, or name a folder on another disk"
        )
    at = f" at {problem.filename}" if problem.filename else ""
    detail = problem.strerror or str(problem) or type(problem).__name__
    return OutputError(
        f"{out} cannot be written ({detail}{at}) and nothing was left there: check the disk, or name another folder"
    )


def _exchange(first: Path, second: Path) -> bool:
    """Exchange the names of two folders in one step; returns whether the system and the filesystem can."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    done: int = rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    return done == 0
