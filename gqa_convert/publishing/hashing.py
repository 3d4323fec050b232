"""Hashes of files: SHA-256, which the Hub states for large files, and git's blob hash, which it states for small ones."""

import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from gqa_convert.checkpoint import formats
from gqa_convert.errors import PublishError

_CHUNK = 1 << 20
_TEXT_BYTES = 32 << 20
"""Maximum bytes of a file that is searched for access tokens; weights are not searched."""
_TOKEN = re.compile(rb"\bhf_[A-Za-z0-9]{30,}")


@dataclass(frozen=True)
class Digest:
    """A file.

    Attributes:
        path: in the repository.
        size: bytes.
        sha256: hexadecimal.
        blob: git's hash of it, hexadecimal.
    """

    path: str
    size: int
    sha256: str
    blob: str


def digest_of(path: str, raw: bytes) -> Digest:
    """The digest of a file that is not written yet."""
    return Digest(
        path, len(raw), hashlib.sha256(raw).hexdigest(), hashlib.sha1(b"blob %d\0" % len(raw) + raw).hexdigest()
    )


def digests(
    folder: Path, names: Iterable[str], progress: Callable[[int], None] = lambda nbytes: None
) -> tuple[Digest, ...]:
    """Read files once each.

    Args:
        folder: that holds the files.
        names: their paths in the folder.
        progress: called with every number of bytes read.

    Raises:
        PublishError: a file can't be read, or changed in the meantime.
    """
    return tuple(_digest(folder, name, progress) for name in names)


def _digest(folder: Path, name: str, progress: Callable[[int], None]) -> Digest:
    try:
        with (folder / name).open("rb", buffering=0) as file:
            size, done = (folder / name).stat().st_size, 0
            sha256, blob = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % size)
            buffer = bytearray(_CHUNK)
            while count := file.readinto(buffer):
                part = memoryview(buffer)[:count]
                sha256.update(part)
                blob.update(part)
                done += count
                progress(count)
    except OSError as problem:
        raise PublishError(f"{folder / name} can't be read ({problem.strerror}): make it readable") from None
    if done != size:
        raise PublishError(f"{folder / name} is being written to: wait until that is done")
    return Digest(name, size, sha256.hexdigest(), blob.hexdigest())


def refuse_tokens(folder: Path, names: Iterable[str], token: str | None, card: str) -> None:
    """Refuse to publish an access token of the Hub.

    Args:
        folder: that holds the files.
        names: their paths in the folder; weights are not searched.
        token: of the user, None if there is none; others are recognised by their form.
        card: the card, which is not written yet.

    Raises:
        PublishError: a file holds an access token.
    """
    for name in names:
        path = folder / name
        if not formats.is_weight_file(name) and path.stat().st_size <= _TEXT_BYTES:
            _refuse(str(path), path.read_bytes(), token)
    _refuse("the model card", card.encode(), token)


def _refuse(where: str, raw: bytes, token: str | None) -> None:
    if _TOKEN.search(raw) or (token and token.encode() in raw):
        raise PublishError(f"{where} holds an access token of the Hub: take it out of what was recorded, and revoke it")
