"""Tokens on disk: tokenised once per text and tokenizer, and mapped into memory.

A finished file is a header of 4096 bytes and the tokens. Its name is a hash of everything that determines the tokens.
It is written atomically, under a lock that the kernel releases when the process dies.
"""

import contextlib
import hashlib
import json
import mmap
import os
import secrets
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from gqa_convert.checkpoint.atomic_files import atomic_file
from gqa_convert.checkpoint.locks import try_lock, wait_for_lock
from gqa_convert.checkpoint.paths import cache_folder
from gqa_convert.checkpoint.resource_errors import is_disk_full
from gqa_convert.errors import DataError
from gqa_convert.text.text_files import FileText
from gqa_convert.text.tokenizing import Encoder

FORMAT = 1
HEADER = 4096
_MAGIC = b"GQATOKEN"

Progress = Callable[[str, int, int], None]
"""Called with the source being tokenised, the bytes done and their total."""


def default_cache() -> Path:
    """The default folder of token files."""
    return cache_folder() / "tokens"


class TokenSource(Protocol):
    """Tokens that samples are cut from."""

    @property
    def fingerprint(self) -> str:
        """A hash that identifies the tokens."""

    @property
    def grows(self) -> bool:
        """Whether the source is still being written, so that its first epoch is shuffled within windows."""

    def size(self, needed: int | None = None) -> tuple[int, bool]:
        """The number of tokens available, and whether it is final. Waits until at least `needed` are available or the
        source has ended.
        """

    def read(self, start: int, count: int) -> npt.NDArray[Any]:
        """Tokens from a position on, continuing with the first token after the last: [count], read-only."""

    def close(self) -> None:
        """Stop background threads."""


def file_key(identity: Any, encoder: Encoder) -> str:
    """The file name of a source's tokens."""
    return hashlib.sha256(json.dumps([FORMAT, identity, encoder.key]).encode()).hexdigest()


def circular(tokens: npt.NDArray[Any], start: int, count: int) -> npt.NDArray[Any]:
    """A slice of an array that is treated as circular: [count]."""
    return (
        tokens[start : start + count]
        if start + count <= len(tokens)
        else tokens[np.arange(start, start + count) % len(tokens)]
    )


class TokenFile:
    """The tokens of files, all of them available."""

    grows = False

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        dtype = np.dtype(header["dtype"])
        self.documents: int = header["documents"]
        self.fingerprint: str = header["sha256"]
        self.tokens = map_tokens(path, dtype, header["tokens"], offset=HEADER)

    def size(self, needed: int | None = None) -> tuple[int, bool]:  # noqa: ARG002
        return len(self.tokens), True

    def read(self, start: int, count: int) -> npt.NDArray[Any]:
        return circular(self.tokens, start, count)

    def close(self) -> None:
        pass


def map_tokens(path: Path, dtype: np.dtype[Any], count: int, *, offset: int = 0) -> npt.NDArray[Any]:
    """The tokens of a file as a memory-mapped array: [count]."""
    if not count:
        return np.empty(0, dtype)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), offset + count * dtype.itemsize, access=mmap.ACCESS_READ)
    return np.frombuffer(mapped, dtype, count, offset)


def open_token_file(path: Path) -> TokenFile | None:
    """The tokens in a file, or None if it is missing, truncated or of another format."""
    header = read_header(path, lambda header: header["tokens"] * np.dtype(header["dtype"]).itemsize)
    return None if header is None else TokenFile(path, header)


def read_header(path: Path, body_bytes: Callable[[dict[str, Any]], int]) -> dict[str, Any] | None:
    """The header of a file, or None if the file is missing, truncated or of another format.

    Args:
        path: the path of the file.
        body_bytes: computes the size of the rest from the header.

    Raises:
        DataError: the file can't be read.
    """
    try:
        with path.open("rb") as file:
            header = _unpacked(file.read(HEADER))
            return (
                header
                if header is not None and os.fstat(file.fileno()).st_size == HEADER + body_bytes(header)
                else None
            )
    except FileNotFoundError:
        return None
    except OSError as problem:
        raise cache_problem(problem, path.parent) from None


def _packed(header: dict[str, Any]) -> bytes:
    body = json.dumps(header).encode()
    return (_MAGIC + hashlib.sha256(body).digest() + body).ljust(HEADER, b" ")


def _unpacked(block: bytes) -> dict[str, Any] | None:
    body = block[40:].rstrip(b" ")
    if len(block) != HEADER or block[:8] != _MAGIC or block[8:40] != hashlib.sha256(body).digest():
        return None
    header: dict[str, Any] = json.loads(body)
    return header if header["format"] == FORMAT else None


def build_token_file(text: FileText, encoder: Encoder, cache: Path, progress: Progress, *, processes: int = 1) -> Path:
    """Tokenise a source unless it is cached. If several processes call this at once, one tokenises and the others wait.

    The parts of the text are tokenised into files of their own, which a later call finds if this one is killed, and
    then joined.

    Args:
        text: the files.
        encoder: the tokenizer.
        cache: the folder of the token files.
        progress: called with the source, the bytes tokenised and their total.
        processes: how many processes tokenise parts. One process uses the tokenizer's threads.

    Raises:
        DataError: the text can't be read or is empty, or the cache can't be written.
    """
    path = cache / f"{file_key(text.identity(), encoder)}.tokens"
    folder = path.with_suffix(".parts")

    def write(file: BinaryIO) -> dict[str, Any]:
        from gqa_convert.text.tokenizing_parts import tokenize_parts

        folder.mkdir(exist_ok=True)
        parts = tokenize_parts(text, encoder, folder, progress, processes)
        header = _join(parts, file)
        if not header["tokens"]:
            raise DataError(
                f"{text.label} holds no text ({len(text.files)} files without a document): name other files"
            )
        return header | {"dtype": encoder.dtype.name}

    build_once(path, lambda: open_token_file(path) is not None, write)
    shutil.rmtree(folder, ignore_errors=True)
    return path


def _join(parts: Iterable[Path], file: BinaryIO) -> dict[str, Any]:
    """Append the tokens of parts to a file; returns the header of the whole without its dtype."""
    digest, tokens, documents = hashlib.sha256(), 0, 0
    for path in parts:
        part = open_token_file(path)
        if part is None:
            raise DataError(f"{path} was changed while its tokens were joined: run the same command again")
        data = part.tokens.tobytes()
        file.write(data)
        digest.update(data)
        tokens, documents = tokens + len(part.tokens), documents + part.documents
    return {"tokens": tokens, "documents": documents, "sha256": digest.hexdigest()}


def build_once(path: Path, is_there: Callable[[], bool], write: Callable[[BinaryIO], dict[str, Any]]) -> None:
    """Write a file of the cache atomically unless it exists.

    Args:
        path: of the file; its stem is a key.
        is_there: whether the file exists; called under a lock of this key.
        write: writes what follows the header, and returns the header.

    Raises:
        DataError: the cache can't be written.
    """
    cache, key = path.parent, path.stem
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with wait_for_lock(cache / f"{key}.lock") as alone:
            if not is_there():
                _sweep(cache, key if alone else None)
                write_token_file(path, write)
    except OSError as problem:
        raise cache_problem(problem, cache) from None


def write_token_file(path: Path, write: Callable[[BinaryIO], dict[str, Any]]) -> None:
    """Write a file atomically.

    Args:
        path: of the file.
        write: writes what follows the header, and returns the header.
    """
    with atomic_file(path, path.with_name(f"{path.stem}-{secrets.token_hex(4)}.part")) as file:
        file.write(bytes(HEADER))
        header = write(file)
        file.seek(0)
        file.write(_packed({"format": FORMAT} | header))


def _sweep(cache: Path, own: str | None) -> None:
    """Remove partial files of killed processes: those of the file whose lock the caller holds, and those that no
    process has locked.
    """
    for part in cache.glob("*.part"):
        key = part.name.split("-")[0]
        with contextlib.suppress(OSError):
            if key == own:
                part.unlink()
                continue
            handle = try_lock(cache / f"{key}.lock", create=False)
            if handle is None:
                continue
            try:
                part.unlink()
            finally:
                os.close(handle)


def cache_problem(problem: OSError, cache: Path) -> DataError:
    """An operating-system error about the cache, as one line."""
    if is_disk_full(problem):
        return DataError(
            f"the disk or quota of the token cache {cache} is full: make room, or set XDG_CACHE_HOME to another disk"
        )
    return DataError(
        f"the token cache {cache} can't be used ({problem.strerror or problem}): set XDG_CACHE_HOME to a folder on a local disk"
    )
