"""Publish a folder atomically: it appears whole or not at all.

The work happens in a temporary sibling of the result, under a lock that the kernel drops when the process dies.
Publication syncs the folders and renames the sibling. The next run removes the leftovers of dead runs, and never those
of a live one.
"""

import contextlib
import ctypes
import errno
import os
import re
import secrets
import shutil
import weakref
from pathlib import Path
from types import TracebackType

from gqa_convert.checkpoint.atomic_files import sync
from gqa_convert.checkpoint.files import is_utf8
from gqa_convert.checkpoint.locks import lock_folder
from gqa_convert.checkpoint.ownership import foreign_files, some
from gqa_convert.checkpoint.resource_errors import is_disk_full
from gqa_convert.errors import GQAConvertError, NoSpaceError, OutputError

_LEFTOVER = re.compile(r"\.(?P<out>.+)\.gqa-convert-[0-9a-f]{8}(?P<aside>-old)?")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
"""How an address such as s3://bucket/name begins, as the first part of a path."""
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
_AT_FDCWD = -100
_ATTEMPTS = 100


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
        _check_destination(out, source, overwrite)
    except OSError as problem:
        raise _explained(problem, out) from None


def _check_destination(out: Path, source: Path | None, overwrite: bool) -> None:
    real = Path(os.path.realpath(out))
    if source is not None:
        _check_apart(out, real, source)
    if out.is_symlink():
        raise OutputError(f"{out} is a link: name the folder itself or another folder")
    if not out.exists():
        return
    if not out.is_dir():
        raise OutputError(f"{out} is a file: name a folder")
    foreign = foreign_files(real)
    if foreign:
        what = f"files that gqa-convert did not write or that were changed or copied there later ({some(foreign)})"
        raise OutputError(f"{out} exists already and holds {what}: name a new folder, or move them away")
    if any(real.iterdir()) and not overwrite:
        raise OutputError(f"{out} exists already: name a new folder, or replace it with --overwrite")
    if os.path.ismount(real):
        raise OutputError(f"{out} is a mount point, which cannot be replaced as a whole: name a new folder in it")
    if _current_folder().is_relative_to(real):
        raise OutputError(
            f"{out} is the current folder or contains it, so that it cannot be replaced: change to another folder, or name a new one"
        )


def _check_apart(out: Path, real: Path, source: Path) -> None:
    origin = source.resolve()
    if real == origin or (real.exists() and real.samefile(origin)):
        raise OutputError(f"{out} is the source itself: name another folder")
    if real.is_relative_to(origin):
        raise OutputError(f"{out} lies inside the source {source}: name a folder outside it")
    if origin.is_relative_to(real):
        raise OutputError(f"{out} contains the source {source}: name another folder")
    if out.is_dir() and any(path.is_symlink() and path.resolve().is_relative_to(real) for path in source.rglob("*")):
        raise OutputError(f"{out} contains files that the source {source} links to: name another folder")


def _current_folder() -> Path:
    try:
        return Path(os.path.realpath(Path.cwd()))
    except FileNotFoundError:  # the current folder was deleted
        return Path("/")


def sweep(parent: Path) -> list[Path]:
    """Remove the leftovers of dead runs in a folder, as far as permissions allow, and return the removed paths."""
    removed = []
    try:
        paths = sorted(path for path in parent.iterdir() if _LEFTOVER.fullmatch(path.name) and path.is_dir())
    except OSError:
        return []
    for path in paths:
        try:
            handle = lock_folder(path)
        except OSError:
            continue
        if handle is not None:  # otherwise a live run holds the lock
            if not _restore(path):
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
            os.close(handle)
    return removed


def _restore(path: Path) -> bool:
    """Give an old result its name back if a run set it aside and died before it published its own.

    Returns:
        Whether `path` was such a result and was renamed.
    """
    match = _LEFTOVER.fullmatch(path.name)
    if match is None or not match["aside"] or (path.parent / match["out"]).exists():
        return False
    with contextlib.suppress(OSError):
        path.rename(path.parent / match["out"])
    return True


class StagedFolder:
    """A context manager that makes `path`, a new, locked, temporary sibling of `out`.

    Leaving the context without calling `publish` removes it. An OSError that leaves the context becomes a NoSpaceError
    or an OutputError.
    """

    def __init__(self, out: Path) -> None:
        self.out = Path(os.path.realpath(out))
        self.path = self.out
        self._handle: int | None = None
        self._cleanup: weakref.finalize[..., StagedFolder] | None = None

    def __enter__(self) -> "StagedFolder":
        try:
            new_parents = [parent for parent in self.out.parents if not parent.exists()]
            self.out.parent.mkdir(parents=True, exist_ok=True)
            for _ in range(_ATTEMPTS):
                self.path = self.out.parent / f".{self.out.name}.gqa-convert-{secrets.token_hex(4)}"
                # cleans up after signals that no other code can catch, at the latest when the interpreter exits
                self._cleanup = weakref.finalize(self, _discard, self.path, new_parents, os.getpid())
                self.path.mkdir()
                try:
                    self._handle = lock_folder(self.path)
                except OSError:  # the filesystem has no locks; there, `sweep` removes nothing either
                    return self
                if self._handle is not None:
                    return self
                self._cleanup.detach()  # another process's sweep locked the folder first and removes it
            raise OutputError(f"{self.out.parent} loses every new folder at once: name another folder")
        except BaseException as problem:
            if self._cleanup is not None:
                self._cleanup()
            if isinstance(problem, OSError):
                raise _explained(problem, self.out) from None
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._cleanup is not None and (pending := self._cleanup.peek()):
            _discard(*pending[2])
            self._cleanup.detach()
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
        if not self.out.exists():
            try:
                _rename(self.path, self.out, _RENAME_NOREPLACE)
            except FileExistsError:
                raise OutputError(
                    f"{self.out} was created by another process during the run: name a new folder, or replace it with --overwrite"
                ) from None
        elif any(self.out.iterdir()):
            self._replace()
        else:
            self.path.rename(self.out)  # succeeds only if the folder there is still empty
        self.path = self.out
        sync(self.out.parent)

    def _replace(self) -> None:
        """Exchange the two folders in one step, so that `out` is complete at every moment, and remove the old one."""
        _rename(self.path, self.out, _RENAME_EXCHANGE)
        if foreign := foreign_files(self.path):  # files that appeared between the check and the exchange
            _rename(self.path, self.out, _RENAME_EXCHANGE)
            raise OutputError(
                f"{self.out} received new files during the run ({some(foreign)}): move them away, or name a new folder"
            )
        sync(self.out.parent)
        # `path` is the old folder now; if this process dies here, the next run removes it
        shutil.rmtree(self.path, ignore_errors=True)


def _discard(path: Path, new_parents: list[Path], process: int) -> None:
    """Remove a temporary folder unless it was published, and the parent folders that were made for it."""
    if os.getpid() != process:
        return
    shutil.rmtree(path, ignore_errors=True)
    for parent in new_parents:
        try:
            parent.rmdir()
        except OSError:
            return


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


def _rename(old: Path, new: Path, flag: int) -> None:
    """Rename with Linux's renameat2 or, where the filesystem lacks it, with the closest sequence of plain renames."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is not None:
        if renameat2(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), flag) == 0:
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
    try:
        old.rename(new)
    except BaseException:
        aside.rename(new)
        raise
    aside.rename(old)
