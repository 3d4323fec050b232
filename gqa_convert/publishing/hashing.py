"""What files are, by their bytes: SHA-256, by which the Hub knows large files, and git's own hash, by which it knows
small ones.
"""

import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from gqa_convert.checkpoint import formats
from gqa_convert.errors import PublishError

_CHUNK = 1 << 20
_TEXT_BYTES = 32 << 20
"""Files up to this size are looked through for tokens, weights aside."""
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
    """Of a file that is not written yet."""
    return Digest(
        path, len(raw), hashlib.sha256(raw).hexdigest(), hashlib.sha1(b"blob %d\0" % len(raw) + raw).hexdigest()
    )


def digests(
    folder: Path, names: Iterable[str], progress: Callable[[int], None] = lambda nbytes: None
) -> tuple[Digest, ...]:
    """Read files once each.

    Args:
        folder: that holds them.
        names: their paths in it.
        progress: called with every number of bytes read.

    Raises:
        PublishError: a file can't be read, or has changed meanwhile.
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
        names: their paths in it; weights are not looked into.
        token: the user's own, if there is one; others are known by their form.
        card: the card, which is not written yet.

    Raises:
        PublishError: a file holds one.
    """
    for name in names:
        path = folder / name
        if not formats.is_weight_file(name) and path.stat().st_size <= _TEXT_BYTES:
            _refuse(str(path), path.read_bytes(), token)
    _refuse("the model card", card.encode(), token)


def _refuse(where: str, raw: bytes, token: str | None) -> None:
    if _TOKEN.search(raw) or (token and token.encode() in raw):
        raise PublishError(f"{where} holds an access token of the Hub: take it out of what was recorded, and revoke it")
