"""SHA-256 of a checkpoint's files, by which bytes that a disk or a network has lost are noticed.

Every process reads its share, so that the time follows from the bytes per process: those that it has just written
itself when a checkpoint is saved, and as many when one is resumed.
"""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

_FILE_OF_PROCESS = re.compile(r"__(\d+)_\d+\.distcp")
"""What torch.distributed.checkpoint calls the files that a process writes."""


def share(names: Iterable[str], process: int, processes: int) -> list[str]:
    """The files that one of `processes` processes reads: those it has written, if there were as many then. Process 0
    reads the others.
    """
    owners = {name: int(match[1]) % processes if (match := _FILE_OF_PROCESS.fullmatch(name)) else 0 for name in names}
    return sorted(name for name, owner in owners.items() if owner == process)


def digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Name -> hexadecimal SHA-256 of files in a folder; reads them whole.

    Raises:
        OSError: a file can't be read.
    """
    found = {}
    for name in names:
        with (folder / name).open("rb") as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def first_difference(folder: Path, expected: dict[str, str]) -> str:
    """What is wrong with the first file that has another digest than the expected one; nothing if none has."""
    for name, digest in expected.items():
        try:
            found = digests(folder, [name])[name]
        except OSError as problem:
            return f"{folder / name} can't be read ({problem.strerror})"
        if found != digest:
            return f"the content of {folder / name} has changed since it was saved (SHA-256 {found[:12]}..., expected {digest[:12]}...)"
    return ""
