"""A folder that appears whole or not at all.

Work happens in a sibling of the result with a temporary name, under a lock that the kernel drops when the process dies.
Publication syncs the folders and renames. The next run removes the leftovers of dead runs, and never those of a live
one.
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
from gqa_convert.checkpoint.locks import lock_folder
from gqa_convert.checkpoint.ownership import foreign_files, some
from gqa_convert.checkpoint.resource_errors import is_disk_full
from gqa_convert.checkpoint.store import is_utf8
from gqa_convert.errors import GQAConvertError, NoSpaceError, OutputError

_LEFTOVER = re.compile(r"\.(?P<out>.+)\.gqa-convert-[0-9a-f]{8}(?P<aside>-old)?")
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
_AT_FDCWD = -100
_ATTEMPTS = 100


def check_destination(out: Path, source: Path | None, *, overwrite: bool) -> None:
    """Refuse a result folder that would lose or mix up files. An empty folder is as good as none.

    Raises:
        OutputError: OUT holds something (without `overwrite`), or files that this program did not write; it is a file,
            a link, a mount point
            or the current folder; it is the source, or one lies within the other.
    """
    if not is_utf8(str(out)):
        raise OutputError(f"the path {out} is no UTF-8, in which results record it: name another folder")
    try:
        _check_destination(out, source, overwrite)
    except OSError as problem:
        raise _explained(problem, out) from None


def _check_destination(out: Path, source: Path | None, overwrite: bool) -> None:
    real = Path(os.path.realpath(out))
    if source is not None:
        _check_apart(out, real, source)
    if out.is_symlink():
        raise OutputError(f"{out} is a link: name the folder itself, or another one")
    if not out.exists():
        return
    if not out.is_dir():
        raise OutputError(f"{out} is a file: name a folder")
    foreign = foreign_files(real)
    if foreign:
        what = f"files that gqa-convert did not write, or that were changed since ({some(foreign)})"
        raise OutputError(f"{out} exists already and holds {what}: name a new folder, or move them away")
    if any(real.iterdir()) and not overwrite:
        raise OutputError(f"{out} exists already: name a new folder, or replace it with --overwrite")
    if os.path.ismount(real):
        raise OutputError(f"{out} is a mount point, which can't be replaced as a whole: name a new folder in it")
    if _current_folder().is_relative_to(real):
        raise OutputError(
            f"{out} is the current folder, which would be gone once it is replaced: go to another folder, or name a new one"
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
        raise OutputError(f"{out} contains files that {source} links to: name another folder")


def _current_folder() -> Path:
    try:
        return Path(os.path.realpath(Path.cwd()))
    except FileNotFoundError:  # deleted already
        return Path("/")


def sweep(parent: Path) -> list[Path]:
    """Remove what dead runs left in a folder, as far as that is allowed; returns what was removed."""
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
        if handle is not None:  # else a live run's
            if not _restore(path):
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
            os.close(handle)
    return removed


def _restore(path: Path) -> bool:
    """Whether `path` was an old result, set aside by a run that died before its own stood there, and now has its name
    again.
    """
    match = _LEFTOVER.fullmatch(path.name)
    if match is None or not match["aside"] or (path.parent / match["out"]).exists():
        return False
    with contextlib.suppress(OSError):
        path.rename(path.parent / match["out"])
    return True


class StagedFolder:
    """A context in which `path` is a new, locked, temporary sibling of `out`; leaving it without `publish` removes it.

    An OSError that leaves the context becomes a NoSpaceError or an OutputError.
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
                # for signals that come when no other code can catch them; it runs at the latest when the interpreter
                # ends
                self._cleanup = weakref.finalize(self, _discard, self.path, new_parents, os.getpid())
                self.path.mkdir()
                try:
                    self._handle = lock_folder(self.path)
                except OSError:  # the filesystem has no locks; there, no sweep takes anything either
                    return self
                if self._handle is not None:
                    return self
                self._cleanup.detach()  # a sweep was faster and takes it away
            raise OutputError(f"{self.out.parent} loses every folder that is made in it: name another folder")
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
        """Give the folder its name, at once. Its files must be synced; the folders are synced here.

        Raises:
            OutputError: something has appeared at `out` meanwhile.
        """
        for root, _, _ in os.walk(self.path):
            sync(Path(root))
        check_destination(self.out, None, overwrite=overwrite)
        if not self.out.exists():
            try:
                _rename(self.path, self.out, _RENAME_NOREPLACE)
            except FileExistsError:
                raise OutputError(
                    f"{self.out} has appeared meanwhile: name a new folder, or replace it with --overwrite"
                ) from None
        elif any(self.out.iterdir()):
            self._replace()
        else:
            self.path.rename(self.out)  # takes the place of an empty folder only
        self.path = self.out
        sync(self.out.parent)

    def _replace(self) -> None:
        """Exchange the two folders in one step, so that a complete one stands at `out` at every moment; the old one
        goes last.
        """
        _rename(self.path, self.out, _RENAME_EXCHANGE)
        if foreign := foreign_files(self.path):  # written between the check and the exchange
            _rename(self.path, self.out, _RENAME_EXCHANGE)
            raise OutputError(
                f"{self.out} was written to meanwhile ({some(foreign)}): move that away, or name a new folder"
            )
        sync(self.out.parent)
        shutil.rmtree(
            self.path, ignore_errors=True
        )  # that is the old one now; should this process die, the next run removes it


def _discard(path: Path, new_parents: list[Path], process: int) -> None:
    """Remove a temporary folder, if it has not been given its name yet, and the folders above it that were made for
    it.
    """
    if os.getpid() != process:
        return
    shutil.rmtree(path, ignore_errors=True)
    for parent in new_parents:
        try:
            parent.rmdir()
        except OSError:
            return


def _explained(problem: OSError, out: Path) -> GQAConvertError:
    """What the system says, as one line."""
    if is_disk_full(problem):
        return NoSpaceError(
            f"the disk or quota of {out.parent} is full, nothing was left behind: make room or name another disk"
        )
    at = f" at {problem.filename}" if problem.filename else ""
    detail = problem.strerror or str(problem) or type(problem).__name__
    return OutputError(
        f"{out} can't be made ({detail}{at}), nothing was left behind: check the disk, or name another folder"
    )


def _rename(old: Path, new: Path, flag: int) -> None:
    """Linux's renameat2; where the filesystem lacks it, the nearest that plain renames can do."""
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
