"""The files of a checkpoint in a local folder, and the protocol that `hub.py` implements for a repository on the Hub."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn, Protocol

from gqa_convert.checkpoint import formats
from gqa_convert.checkpoint.signed_card import is_set_aside
from gqa_convert.errors import CorruptCheckpointError

_NAMED = 3
"""Number of links that a note names; it counts the rest."""


class CheckpointFiles(Protocol):
    """The files of a checkpoint, readable in byte ranges."""

    sizes: dict[str, int]
    """Size in bytes by path relative to the checkpoint, with forward slashes."""

    folder: Path | None
    """The local folder that holds the files, or None if they are remote."""

    links_out: tuple[str, ...]
    """The links that lead out of the folder and are not in `sizes`."""

    def read(self, name: str, start: int, length: int) -> bytes:
        """Return `length` bytes of a file from byte `start`, or fewer at the end of the file."""
        ...


class LocalFiles:
    """The files of a local folder, without hidden files, Python caches and a user's README that gave way to a card.

    Links are followed where they stay inside the folder or lead to the files that the Hub's cache keeps for the same
    repository. Other links may show any file of this machine, and are listed in `links_out`. Weights and the config may
    be links to any place: what is read from them is numbers and a model's description, and anything else is refused.
    """

    def __init__(self, folder: Path) -> None:
        self.folder: Path | None = folder
        self.sizes: dict[str, int] = {}
        links_out: list[str] = []
        for name in walk(folder, links_out.append):
            path = folder / name
            if path.name.startswith(".") or is_set_aside(name):
                continue
            is_read = name == "config.json" or formats.is_weight_file(name)
            if not is_read and leads_out(path, folder):
                links_out.append(name)
            elif path.is_symlink() and not path.exists():
                raise CorruptCheckpointError(f"{path} is a broken link: download or copy the checkpoint again")
            elif path.is_file():
                _refuse_non_utf8(name, folder)
                self.sizes[name] = path.stat().st_size
        self.links_out = tuple(sorted(links_out))

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


def walk(folder: Path, on_link_out: Callable[[str], None]) -> Iterator[str]:
    """Yield the path of every file relative to a folder, with forward slashes; hidden folders and Python's caches are
    omitted.

    Args:
        folder: the folder.
        on_link_out: called with the path of every link to a folder that is not followed because it leads out.
    """
    for root, folders, names in os.walk(folder, followlinks=True, onerror=_refuse):
        here = Path(root)
        if here.resolve() in (parent.resolve() for parent in here.parents if parent.is_relative_to(folder)):
            folders.clear()  # the folder is a link to one of its parents
            continue
        inside = here.relative_to(folder)
        visible = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        folders[:] = [name for name in visible if not leads_out(here / name, folder)]
        for name in visible:
            if name not in folders:
                on_link_out(f"{(inside / name).as_posix()}/")
        for name in sorted(names):
            yield (inside / name).as_posix()


def leads_out(path: Path, folder: Path) -> bool:
    """Return whether a path below a folder is a link, or leads through links, to a file elsewhere or to a hidden one.

    The folder may be a snapshot in the Hub's cache, whose links lead to the `blobs` beside the snapshots.
    """
    if not path.is_symlink():
        return False
    target, root = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    if target.is_relative_to(root):
        return any(part.startswith(".") for part in target.relative_to(root).parts)
    blobs = (parent.parent / "blobs" for parent in root.parents if parent.name == "snapshots")
    return target.parent not in (Path(os.path.realpath(each)) for each in blobs)


def links_note(links_out: tuple[str, ...]) -> list[str]:
    """Return a note on links that lead out of a checkpoint's folder, if there are any."""
    if not links_out:
        return []
    more = len(links_out) - _NAMED
    names = ", ".join(links_out[:_NAMED]) + (f" and {more} more" if more > 0 else "")
    return [f"links that lead out of the folder are not copied: {names}"]
