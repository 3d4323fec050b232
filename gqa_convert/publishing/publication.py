"""Publish a folder atomically: it appears whole or not at all.

The work happens in a temporary sibling of the result. A lock file beside it, whose lock the kernel
drops when the process dies, says that the run lives. Publication syncs the folders and renames the
sibling. The next run removes what dead runs left, and never what belongs to a live one.
"""

import ctypes
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gqa_convert.errors import GQAConvertError, NoSpaceError, OutputError, is_disk_full
from gqa_convert.runtime.messages import some

from .atomic_files import sync
from .locks import try_lock
from .ownership import foreign_files

_LOCK = re.compile(r"\..+\.gqa-convert-[0-9a-f]{8}\.lock")
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def check_destination(out: Path, source: Path | None, *, overwrite: bool) -> None:
    """Refuse a result folder in which files would be lost or mixed. An empty folder is accepted.

    Raises:
        OutputError: `out` holds a result (without `overwrite`) or files that this program did not
            write; it is a file, a link or a mount point; it is the source, or one lies within the
            other.
    """
    try:
        real = Path(os.path.realpath(out))
        if source is not None:
            origin = source.resolve()
            if real.is_relative_to(origin) or origin.is_relative_to(real):
                raise OutputError(
                    f"{out} is the source {source}, lies inside it or contains it: "
                    "name another folder"
                )
            links = (path for path in source.rglob("*") if path.is_symlink())
            if any(path.resolve().is_relative_to(real) for path in links):
                raise OutputError(
                    f"{out} contains files that the source {source} links to: name another folder"
                )
        if out.is_symlink():
            raise OutputError(f"{out} is a link: name the folder itself or another folder")
        if not out.exists():
            return
        if not real.is_dir():
            raise OutputError(f"{out} is a file: name a folder")
        if any(real.iterdir()) and not overwrite:
            raise OutputError(
                f"{out} exists already: "
                "name a new folder, or replace an earlier result with --overwrite"
            )
        # only what this program wrote may be replaced
        if foreign := foreign_files(real):
            raise OutputError(
                f"{out} exists already and holds files that gqa-convert did not write or that "
                f"were changed or copied there later ({some(foreign)}): "
                "name a new folder, or move them away"
            )
        if os.path.ismount(real):
            raise OutputError(
                f"{out} is a mount point, which cannot be replaced as a whole: "
                "name a new folder in it"
            )
    except OSError as problem:
        raise _explained(problem, out) from None


def sweep(parent: Path) -> None:
    """Remove what dead runs left in a folder, as far as permissions allow."""
    for lock in parent.glob(".*.lock"):
        if not _LOCK.fullmatch(lock.name):
            continue
        with suppress(OSError):  # there are no locks here, or the files belong to somebody else
            handle = try_lock(lock)
            if handle is None:
                continue  # a live run holds it
            try:
                if lock.with_suffix("").is_dir():
                    shutil.rmtree(lock.with_suffix(""))
                lock.unlink()
            finally:
                os.close(handle)


@dataclass(frozen=True)
class StagedFolder:
    """A temporary sibling of a result, in which the result is made; `staged_folder` makes it."""

    out: Path
    """The result."""
    path: Path
    """The sibling."""

    def publish(self, *, overwrite: bool) -> None:
        """Give the folder its final name in one step. Its files must be synced already; folders are
        synced here.

        Raises:
            OutputError: another file or folder has appeared at `out`.
            OSError: the same, at the last moment; or the filesystem cannot exchange an earlier
                result for this one.
        """
        for root, _, _ in os.walk(self.path):
            sync(Path(root))
        if self.out.exists() and any(self.out.iterdir()):
            if not overwrite:
                raise OutputError(f"{self.out} appeared during the run: name a new folder")
            # files may have come since the destination was checked
            _exchange(self.path, self.out)
            try:
                if foreign := foreign_files(self.path):
                    raise OutputError(
                        f"{self.out} received new files during the run ({some(foreign)}): "
                        "move them away, or name a new folder"
                    )
            except BaseException:
                _exchange(self.path, self.out)
                raise
        else:
            self.path.rename(self.out)  # succeeds only if there is nothing, or an empty folder
        try:
            sync(self.out.parent)
        except OSError as problem:
            raise OutputError(
                f"{self.out} is complete, but the disk has not confirmed its name "
                f"({problem.strerror}): check the disk"
            ) from None


@contextmanager
def staged_folder(out: Path) -> Iterator[StagedFolder]:
    """A context with a new, locked, temporary sibling of `out`, after a sweep. At the end it goes,
    unless it was published; the earlier result goes then.

    An OSError that leaves the context becomes a NoSpaceError or an OutputError.
    """
    out = Path(os.path.realpath(out))
    # beside the result, since only a rename within a filesystem is atomic
    path = out.with_name(f".{out.name}.gqa-convert-{secrets.token_hex(4)}")
    lock = path.with_name(f"{path.name}.lock")
    handle = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        sweep(out.parent)
        with suppress(
            OSError
        ):  # the filesystem has no locks; there, `sweep` removes nothing either
            while handle is None:  # another process's sweep has it for a moment
                handle = try_lock(lock)
        path.mkdir()
        if out.is_dir() and any(out.iterdir()):
            # whether the filesystem can exchange folders, before hours of work, not after them
            one, other = path / "one", path / "other"
            one.mkdir()
            other.mkdir()
            _exchange(one, other)
            one.rmdir()
            other.rmdir()
        yield StagedFolder(out, path)
    except OSError as problem:
        raise _explained(problem, out) from problem
    finally:
        shutil.rmtree(path, ignore_errors=True)
        with suppress(OSError):
            lock.unlink()
        if handle is not None:
            os.close(handle)


def _explained(problem: OSError, out: Path) -> GQAConvertError:
    """Turn an error of the operating system into one line."""
    detail = problem.strerror or str(problem) or type(problem).__name__
    path = Path(str(problem.filename or out))
    if path.is_relative_to(out.parent) and is_disk_full(problem):
        return NoSpaceError(
            f"the disk or quota of {out.parent} is full and nothing was written: "
            "free some space, or name a folder on another disk"
        )
    return OutputError(
        f"{path} cannot be read or written ({detail}), and nothing was left at {out}: "
        "check the disk, or name another folder"
    )


def _exchange(first: Path, second: Path) -> None:
    """Exchange the names of two folders in one step.

    Raises:
        OSError: the filesystem cannot.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(
        _AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE
    ):
        raise OSError(
            ctypes.get_errno(), "its filesystem cannot exchange it for the new one in one step"
        )
