"""Tokens on disk: a source is tokenised once for each tokenizer, and mapped into memory.

Each source has a file of tokens, and a record beside it, which states how many of them count and is
replaced once they are on the disk. A tokenisation that was killed therefore goes on where the last
one ended, and a stream is tokenised further when a run needs more of it. The name of both is a hash
of everything that determines the tokens.

A lock makes others wait instead of doing the same work. Nothing else depends on it, since many
network file systems have locks within one machine only: a token is written to its own place in the
file, and whoever writes there writes the same.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import numpy as np

from gqa_convert.errors import DataError, is_disk_full, no_space
from gqa_convert.publishing.atomic_files import atomic_file
from gqa_convert.publishing.locks import wait_for_lock
from gqa_convert.runtime.paths import cache_folder

from .encoders import LAST, Encoder, Marked, ids_of
from .files import Files, Piece
from .order import Integers
from .sources import TextSource

_FORMAT = 3
_BATCH_CHARACTERS = 1 << 22
_BATCH_PIECES = 1024
_SAMPLED = 1 << 14
"""Tokens of a file that are checked when it is opened, which takes a second on a network file
system.
"""

OnTokenize = Callable[[str, int, int], None]
"""Called with the source being tokenised, what is done and the total: bytes of files, tokens of
streams.
"""


def default_cache() -> Path:
    """The folder of token files."""
    return cache_folder() / "tokens"


class _Record(NamedTuple):
    """What of a source is tokenised.

    Attributes:
        tokens: the tokens that count.
        pieces: the pieces that they were made of.
        digest: a hash of the tokens.
        sample: a hash of some of them, by which a file is checked when it is opened.
        largest: the largest id.
        complete: whether they are all of the source.
    """

    tokens: int = 0
    pieces: int = 0
    digest: str = ""
    sample: str = ""
    largest: int = 0
    complete: bool = False

    def suffices(self, needed: int | None) -> bool:
        """Whether there are so many tokens, or None for all of the source."""
        return self.complete or (needed is not None and self.tokens >= needed)


@dataclass(frozen=True, eq=False)
class TokenSource:
    """The tokens of a source.

    Attributes:
        tokens: [tokens], with their marks; usually a mapped file.
        label: the source as the user names it.
        complete: whether they are all of the source.
        is_stream: whether the source may never end, so that its first epoch is shuffled within
            windows.
        fingerprint: a hash that identifies the tokens; for a stream also those that are still to
            come.
        largest: the largest id among them.
    """

    tokens: Marked
    label: str = ""
    complete: bool = True
    is_stream: bool = False
    fingerprint: str = ""
    largest: int = 0

    @property
    def size(self) -> int:
        """The number of tokens."""
        return len(self.tokens)

    def read(self, start: int, count: int) -> Integers:
        """The ids of tokens from a position on, continuing with the first token after the last:
        [count].
        """
        return ids_of(self._marked(start, count))

    def positions(self, start: int, count: int) -> Integers:
        """The place of each of these tokens in what `read` returns of its document: [count]."""
        places = np.arange(count)
        follows = np.roll(self._marked(start, count) & LAST, 1) != 0
        return places - np.maximum.accumulate(np.where(follows, places, 0))

    def _marked(self, start: int, count: int) -> Marked:
        return self.tokens.take(np.arange(start, start + count), mode="wrap")

    def document(self, number: int) -> Integers:
        """The ids of a document's tokens: [n]."""
        start = self.ends[number - 1] if number else 0
        return ids_of(self.tokens[start : self.ends[number]])

    @cached_property
    def ends(self) -> Integers:
        """The positions behind the last token of each document: [documents]."""
        return np.flatnonzero(self.tokens & LAST) + 1


def tokenize(
    text: TextSource,
    encoder: Encoder,
    *,
    needed: int | None = None,
    progress: OnTokenize = lambda *_: None,
) -> TokenSource:
    """The tokens of a source, which is tokenised as far as the cache doesn't have it.

    If several processes call this at once, one tokenises and the others wait, where the file system
    has locks.

    Args:
        text: the source.
        encoder: the tokenizer.
        needed: how many tokens suffice; None for all of the source.
        progress: called after each batch.

    Raises:
        DataError: the text can't be read or is empty, or the cache can't be written.
        NoSpaceError: its disk is full.
    """
    cache = default_cache()
    identity = [_FORMAT, text.identity(), repr(encoder.fields), encoder.key]
    name = hashlib.sha256(json.dumps(identity, default=str).encode()).hexdigest()
    path = cache / f"{name}.tokens"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with wait_for_lock(path.with_suffix(".lock")):
            record = _read_record(path)
            if not record.suffices(needed):
                appended = _appended(text, encoder, path, record)
                for record in appended:
                    _keep(path, record)
                    _tell(text, record, needed, progress)
                    if record.suffices(needed):
                        break
        tokens = _mapped(path, record)
    except OSError as problem:
        if is_disk_full(problem):
            raise no_space(cache, "continues (or set XDG_CACHE_HOME to another disk)") from None
        raise DataError(
            f"the token cache {cache} can't be used ({problem.strerror or problem}): "
            "set XDG_CACHE_HOME to a folder on a local disk"
        ) from None
    return TokenSource(
        tokens,
        label=text.label,
        complete=record.complete,
        is_stream=text.is_stream,
        fingerprint=name if text.is_stream else record.digest,
        largest=record.largest,
    )


def _appended(text: TextSource, encoder: Encoder, path: Path, record: _Record) -> Iterator[_Record]:
    """Append the tokens of the documents after those of a record: the new record after each batch.

    Raises:
        DataError: the text can't be read or is empty.
    """
    path.touch()
    with path.open("r+b") as file:
        file.seek(record.tokens * LAST.itemsize)
        # those before are read again, which takes little beside tokenising
        for pieces in batched(islice(text.pieces(encoder.fields), record.pieces, None)):
            tokens = encoder.encode(pieces)
            data = tokens.tobytes()
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            record = record._replace(
                tokens=record.tokens + len(tokens),
                pieces=record.pieces + len(pieces),
                digest=hashlib.sha256(record.digest.encode() + data).hexdigest(),
                largest=max(record.largest, int(ids_of(tokens).max(initial=0))),
            )
            if record.tokens:
                record = record._replace(sample=_sample(_mapped(path, record)))
                yield record
    if not record.tokens:
        path.unlink()
        raise DataError(f"{text.label} holds no text: name another source, or other fields")
    yield record._replace(complete=True)


def _keep(path: Path, record: _Record) -> None:
    """Replace the record of a token file."""
    with atomic_file(path.with_suffix(".json"), path.with_suffix(f".{uuid4()}.new")) as file:
        file.write(json.dumps(record._asdict()).encode())


def _tell(text: TextSource, record: _Record, needed: int | None, progress: OnTokenize) -> None:
    """Report bytes of files, or tokens of a stream."""
    if isinstance(text, Files):
        progress(text.label, text.bytes_read, text.total_bytes)
    elif needed is not None:
        progress(text.label, min(record.tokens, needed), needed)


def _mapped(path: Path, record: _Record) -> Marked:
    """The tokens of a record: [tokens].

    Raises:
        OSError, ValueError: the file is missing or too short.
    """
    return np.asarray(np.memmap(path, "<u4", "r", shape=(record.tokens,)))


def _sample(tokens: Marked) -> str:
    """A hash of tokens from all parts of a file."""
    return hashlib.sha256(tokens[:: 1 + len(tokens) // _SAMPLED].tobytes()).hexdigest()


def batched(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces in batches, large enough for several threads and small enough for memory."""
    batch = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(str(piece.text))
        if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_PIECES:
            yield batch
            batch = []
            characters = 0
    if batch:
        yield batch


def _read_record(path: Path) -> _Record:
    """What counts of a token file; nothing if there is none, or the files are damaged."""
    with suppress(OSError, ValueError, TypeError):
        record = _Record(**json.loads(path.with_suffix(".json").read_bytes()))
        if _sample(_mapped(path, record)) == record.sample:
            return record
    return _Record()
