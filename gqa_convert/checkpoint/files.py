"""The files of a checkpoint in a local folder; `hub.HubFiles` is read in the same way."""

import os
from pathlib import Path
from typing import NoReturn

from gqa_convert.checkpoint import formats
from gqa_convert.errors import CorruptCheckpointError


class LocalFiles:
    """The files of a local folder, without hidden files, Python caches and a user's README that gave way to a card.

    Links to files are followed where they stay inside the folder or lead to the files that the Hub's cache keeps for the
    same repository. Other links may show any file of this machine, and they and links to folders are listed in
    `links_out`. Weights and the config may be links to any place: what is read from them is numbers and a model's
    description, and anything else is refused.

    Attributes:
        folder: the folder.
        name: what the user called it.
        commit: of a snapshot in the Hub's cache.
        unreachable: why the Hub was not asked for a newer one.
        sizes: size in bytes by path relative to it, with forward slashes.
        links_out: the links that are not followed.
    """

    def __init__(self, folder: Path, name: str, commit: str | None = None, unreachable: str | None = None) -> None:
        self.folder = folder
        self.name = name
        self.commit = commit
        self.unreachable = unreachable
        self.sizes: dict[str, int] = {}
        links_out: list[str] = []
        for root, folders, names in os.walk(folder, onerror=_refuse):
            folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
            links = [path for path in (Path(root, name) for name in folders) if path.is_symlink()]
            links_out += [f"{path.relative_to(folder)}/" for path in links]
            for path in sorted(Path(root, name) for name in names if not name.startswith(".")):
                relative = path.relative_to(folder).as_posix()
                may_lie_elsewhere = relative == "config.json" or formats.is_weight_file(relative)
                if not may_lie_elsewhere and leads_out(path, folder):
                    links_out.append(relative)
                elif path.is_file():
                    self.sizes[relative] = path.stat().st_size
                elif path.is_symlink():
                    raise CorruptCheckpointError(f"{path} is a broken link: download or copy the checkpoint again")
        self.links_out = tuple(sorted(links_out))

    def read(self, name: str, length: int) -> bytes:
        """Return the first `length` bytes of a file.

        Raises:
            CorruptCheckpointError: the file ends before, or cannot be read.
        """
        path = self.folder / name
        try:
            with path.open("rb") as file:
                return checked_length(file.read(length), length, str(path))
        except OSError as problem:
            _refuse(problem)


def checked_length(raw: bytes, length: int, where: str) -> bytes:
    """Return the first bytes of a file, which must be `length` bytes."""
    if len(raw) < length:
        raise CorruptCheckpointError(
            f"{where} ends at byte {len(raw):,} instead of {length:,}: download or copy it again"
        )
    return raw


def _refuse(problem: OSError) -> NoReturn:
    raise CorruptCheckpointError(f"{problem.filename} cannot be read ({problem.strerror}): check the disk") from None


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
