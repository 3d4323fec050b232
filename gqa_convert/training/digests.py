"""SHA-256 digests of a checkpoint's files, which detect corruption by a disk or a network.

Every process reads its share, so that the time depends on the bytes per process. When a checkpoint is saved, a process
reads the files that it has just written.
"""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

_FILE_OF_PROCESS = re.compile(r"__(\d+)_\d+\.distcp")
"""The names that torch.distributed.checkpoint gives to the files of a process."""


def share(names: Iterable[str], process: int, processes: int) -> list[str]:
    """The files that one of `processes` processes reads: those that it wrote, if the number of processes is the same.
    Process 0 reads the others.
    """
    owners = {name: int(match[1]) % processes if (match := _FILE_OF_PROCESS.fullmatch(name)) else 0 for name in names}
    return sorted(name for name, owner in owners.items() if owner == process)


def digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """The hexadecimal SHA-256 of files in a folder, by name.

    Raises:
        OSError: a file can't be read.
    """
    found = {}
    for name in names:
        with (folder / name).open("rb") as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def first_difference(folder: Path, expected: dict[str, str]) -> str:
    """The problem of the first file whose digest is not the expected one; empty if there is none."""
    for name, digest in expected.items():
        try:
            found = digests(folder, [name])[name]
        except OSError as problem:
            return f"{folder / name} can't be read ({problem.strerror})"
        if found != digest:
            return f"the content of {folder / name} has changed since it was saved (SHA-256 {found[:12]}..., expected {digest[:12]}...)"
    return ""
