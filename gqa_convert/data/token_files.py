"""Tokens on disk: a source is tokenised once for each tokenizer, and mapped into memory.

Each source has a file of tokens, which is only appended to, and a record beside it, which states how many of them count
and is replaced once they are on the disk. A tokenisation that was killed therefore goes on where the last one ended, and a
stream is tokenised further when a run needs more of it. The name of both is a hash of everything that determines the
tokens.

A token is its id with two marks in the upper bits, for which a vocabulary has no use.
"""

import hashlib
import json
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from gqa_convert.checkpoint.atomic_files import write_whole
from gqa_convert.checkpoint.locks import wait_for_lock
from gqa_convert.checkpoint.paths import cache_folder
from gqa_convert.checkpoint.resource_errors import is_disk_full, no_space
from gqa_convert.data.documents import Piece
from gqa_convert.data.files import Files
from gqa_convert.data.order import Integers
from gqa_convert.data.sources import TextSource
from gqa_convert.errors import DataError, DeviceMemoryError, GQAConvertError

Marked = npt.NDArray[np.uint32]
"""Token ids with their marks."""
LAST: Final = np.uint32(1 << 31)
"""The mark of the last token of a document."""
UNLEARNED: Final = np.uint32(1 << 30)
"""The mark of a token that is not predicted in training."""
_ID: Final = UNLEARNED - np.uint32(1)
_FORMAT = 2
_BATCH_CHARACTERS = 1 << 22
_BATCH_PIECES = 1024
_LOOK = 1 << 22
_THREADS = "TOKENIZERS_PARALLELISM"

OnTokenize = Callable[[str, int, int], None]
"""Called with the source being tokenised, what is done and the total: bytes of files, tokens of streams."""


class Encoder(Protocol):
    """Turns documents into tokens.

    Attributes:
        fields: the fields of a row that hold a document.
        key: everything that determines the tokens of a document, as plain data.
    """

    fields: Any
    key: list[Any]

    def encode(self, pieces: Sequence[Piece]) -> Marked:
        """The tokens of the pieces, one behind the other: [tokens]."""


def packed(parts: Sequence[Sequence[int]], ends: Sequence[bool]) -> Marked:
    """Token ids one behind the other, with the mark of the last token at the end of each part for which `ends` is true:
    [tokens].
    """
    flat = np.fromiter(chain.from_iterable(parts), np.uint32, sum(map(len, parts)))
    stops = np.cumsum([len(part) for part in parts], dtype=np.int64)
    last = stops[np.array(ends, bool)] - 1
    flat[last[last >= 0]] |= LAST
    return flat


def default_cache() -> Path:
    """The default folder of token files."""
    return cache_folder() / "tokens"


@dataclass(frozen=True)
class _Record:
    """What of a source is tokenised.

    Attributes:
        tokens: the tokens that count.
        pieces: the pieces that they were made of.
        digest: a hash of the tokens.
        complete: whether they are all of the source.
        position: of the next piece in a stream.
    """

    tokens: int = 0
    pieces: int = 0
    digest: str = ""
    complete: bool = False
    position: Any = None


class TokenSource:
    """The tokens of a source.

    Args:
        marked: [tokens], with their marks; usually a mapped file.
        label: the source as the user names it.
        pieces: the pieces that the tokens were made of.
        complete: whether they are all of the source.
        is_stream: whether the source may never end, so that its first epoch is shuffled within windows.
        text: the source; None for tokens in memory.
        fingerprint: a hash that identifies the tokens; for a stream also those that are still to come.
    """

    def __init__(
        self,
        marked: Marked,
        *,
        label: str = "",
        pieces: int = 0,
        complete: bool = True,
        is_stream: bool = False,
        text: TextSource | None = None,
        fingerprint: str = "",
    ) -> None:
        self._tokens, self.size = marked, len(marked)
        self.label, self.pieces, self.complete, self.is_stream = label, pieces, complete, is_stream
        self.text, self.fingerprint = text, fingerprint

    def marked(self, start: int, count: int) -> Marked:
        """Tokens from a position on with their marks, continuing with the first token after the last: [count]."""
        return self._tokens.take(np.arange(start, start + count), mode="wrap")

    def read(self, start: int, count: int) -> Marked:
        """As `marked`, without the marks."""
        return self.marked(start, count) & _ID

    @cached_property
    def ends(self) -> Integers:
        """The positions behind the last token of each document: [documents]."""
        return np.flatnonzero(self._tokens & LAST) + 1

    def learns_any(self) -> bool:
        """Whether any of the tokens is predicted in training."""
        parts = (self._tokens[at : at + _LOOK] for at in range(0, self.size, _LOOK))
        return any(not (part & UNLEARNED).all() for part in parts)


def ids_of(marked: Marked) -> Integers:
    """The ids of tokens without their marks."""
    return (marked & _ID).astype(np.int64)


def tokenize(
    text: TextSource,
    encoder: Encoder,
    cache: Path,
    *,
    needed: int | None = None,
    progress: OnTokenize = lambda label, done, total: None,
    processes: int = 1,
) -> TokenSource:
    """The tokens of a source, which is tokenised as far as the cache doesn't have it. If several processes call this at
    once, one tokenises and the others wait.

    Args:
        text: the source.
        encoder: the tokenizer.
        cache: the folder of the token files.
        needed: how many tokens suffice; None for all of the source.
        progress: called after each batch.
        processes: how many processes tokenise. One process uses the tokenizer's threads.

    Raises:
        DataError: the text can't be read or is empty, or the cache can't be written.
        NoSpaceError: its disk is full.
    """
    path = _path(text, encoder, cache)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with wait_for_lock(path.with_suffix(".lock")) as locked:
            record = _read_record(path) or _Record()
            if not record.complete and (needed is None or record.tokens < needed):
                if not locked:
                    raise DataError(
                        f"the file system of the token cache {cache} has no locks: set XDG_CACHE_HOME to a folder on a local disk"
                    )
                _append(text, encoder, path, record, needed, progress, processes)
    except OSError as problem:
        raise _cache_problem(problem, cache) from None
    return open_tokens(text, encoder, cache)


def open_tokens(text: TextSource, encoder: Encoder, cache: Path) -> TokenSource:
    """The tokens of a source that another process has tokenised.

    Raises:
        DataError: there are none.
    """
    path = _path(text, encoder, cache)
    record = _read_record(path)
    if record is None:
        raise DataError(
            f"{text.label} was not tokenised into {cache} by the first process of this machine: see its message"
        )
    return TokenSource(
        np.asarray(np.memmap(path, "<u4", "r", shape=(record.tokens,))),
        label=text.label,
        pieces=record.pieces,
        complete=record.complete,
        is_stream=text.is_stream,
        text=text,
        fingerprint=path.stem if text.is_stream else record.digest,
    )


def _path(text: TextSource, encoder: Encoder, cache: Path) -> Path:
    identity = [_FORMAT, text.identity(), repr(encoder.fields), encoder.key]
    return cache / f"{hashlib.sha256(json.dumps(identity, default=str).encode()).hexdigest()}.tokens"


def _append(
    text: TextSource,
    encoder: Encoder,
    path: Path,
    record: _Record,
    needed: int | None,
    progress: OnTokenize,
    processes: int,
) -> None:
    """Append the tokens of the documents after those of a record until they suffice or the source ends."""
    if not record.tokens:
        path.unlink(missing_ok=True)  # another run may have mapped it
    left = text.pieces(encoder.fields, record.pieces, record.position)
    batches = ((batch, text.position()) for batch in batched(left))
    with path.open("ab") as file:
        file.truncate(record.tokens * LAST.itemsize)  # what was written after the last record
        for tokens, pieces, position in _encoded(encoder, batches, processes):
            data = tokens.tobytes()
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            record = _Record(
                tokens=record.tokens + len(tokens),
                pieces=record.pieces + pieces,
                digest=hashlib.sha256(record.digest.encode() + data).hexdigest(),
                position=position,
            )
            _write_record(path, record)
            if isinstance(text, Files):
                progress(text.label, text.bytes_read(), text.total_bytes)
            elif needed is not None:
                progress(text.label, min(record.tokens, needed), needed)
            if needed is not None and record.tokens >= needed:
                return
    if not record.tokens:
        path.unlink()
        path.with_suffix(".json").unlink(missing_ok=True)
        raise DataError(f"{text.label} holds no text: name another source, or other fields")
    _write_record(path, replace(record, complete=True, position=None))


def batched(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces in batches, large enough for several threads and small enough for memory."""
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(str(piece.text))
        if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_PIECES:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encoded(
    encoder: Encoder, batches: Iterator[tuple[list[Piece], Any]], processes: int
) -> Iterator[tuple[Marked, int, Any]]:
    """The tokens of each batch, the number of its pieces, and the position behind it."""
    if processes == 1:
        for pieces, position in batches:
            yield encoder.encode(pieces), len(pieces), position
        return
    threads = os.environ.get(_THREADS)
    others = multiprocessing.active_children()
    os.environ[_THREADS] = "false"  # the processes would have too many of them
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("fork"), _start, (encoder,))
    waiting: deque[Any] = deque()
    try:
        for pieces, position in batches:
            waiting.append((pool.submit(_encode, pieces), len(pieces), position))
            if len(waiting) > 2 * processes:
                future, count, behind = waiting.popleft()
                yield future.result(), count, behind
        for future, count, behind in waiting:
            yield future.result(), count, behind
    except BrokenProcessPool:
        raise DeviceMemoryError(
            "a process that tokenised was killed, perhaps for lack of memory: run the same command again with fewer processes, which keeps "
            "what is ready"
        ) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            if process not in others:  # it would finish its batch first
                process.terminate()
        del os.environ[_THREADS]
        if threads is not None:
            os.environ[_THREADS] = threads


_encoder: Encoder
"""What a process of the pool works with."""


def _start(encoder: Encoder) -> None:
    """Prepare a process of the pool. Stopping is the business of the process that started it."""
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    _encoder = encoder


def _encode(pieces: list[Piece]) -> Marked:
    return _encoder.encode(pieces)


def _read_record(path: Path) -> _Record | None:
    """What counts of a token file; None if there is nothing, or the files are damaged or of another format."""
    try:
        stated = json.loads(path.with_suffix(".json").read_bytes())
        record = _Record(**stated["record"])
        if stated["format"] == _FORMAT and 0 < record.tokens * LAST.itemsize <= path.stat().st_size:
            return record
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def _write_record(path: Path, record: _Record) -> None:
    write_whole(path.with_suffix(".json"), json.dumps({"format": _FORMAT, "record": asdict(record)}).encode())


def _cache_problem(problem: OSError, cache: Path) -> GQAConvertError:
    """An operating-system error about the cache, as one line."""
    if is_disk_full(problem):
        return no_space(cache, "continues (or set XDG_CACHE_HOME to another disk)")
    return DataError(
        f"the token cache {cache} can't be used ({problem.strerror or problem}): set XDG_CACHE_HOME to a folder on a local disk"
    )
