"""Tokens of a stream, in a file that grows while it is read.

One process of a machine appends to it, and others read it. The commit file beside it states how many tokens are valid,
and is replaced atomically once the tokens are on disk. If a writer is killed, the next one continues from the last
commit.
"""

import contextlib
import copy
import hashlib
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy.typing as npt

from gqa_convert.checkpoint.atomic_files import atomic_file
from gqa_convert.checkpoint.locks import try_lock
from gqa_convert.errors import DataError, GQAConvertError
from gqa_convert.text.documents import Columns, Piece
from gqa_convert.text.hub_rows import HubText
from gqa_convert.text.token_files import FORMAT, cache_problem, circular, file_key, map_tokens
from gqa_convert.text.tokenizing import Encoder, batches

_AHEAD = 1 << 25
"""The tokens that are kept ready beyond those requested."""

_POLL = 0.05
_PATIENCE = 1800.0
"""Seconds without a new token after which a reader gives up."""

_ATTEMPTS = 6
"""How often an interrupted stream is reopened without receiving a token."""


class Commit(NamedTuple):
    """The part of a stream that is on disk.

    Attributes:
        rows: the rows of the dataset read so far.
        state: the position that the dataset reported.
    """

    tokens: int = 0
    rows: int = 0
    finished: bool = False
    state: Any = None


class GrowingFile:
    """The tokens of a stream that have been received so far.

    Args:
        text: the stream of documents.
        encoder: the tokenizer.
        cache: the folder of the file.
        writes: whether this process may append (one per machine).
    """

    grows = True

    def __init__(self, text: HubText, encoder: Encoder, cache: Path, *, writes: bool) -> None:
        self.label = text.label
        self.fingerprint = file_key(text.identity(), encoder)
        self._dtype = encoder.dtype
        self._path = cache / f"{self.fingerprint}.growing"
        self._request_path = self._path.with_suffix(".wish")
        self._commit = Commit()
        self._tokens = map_tokens(self._path, self._dtype, 0)
        self._writer = _Writer(text, encoder, self._path) if writes else None

    def size(self, needed: int | None = None) -> tuple[int, bool]:
        """See `TokenSource.size`.

        Raises:
            DataError: the stream failed, or no token was received for half an hour.
        """
        if needed is None or self._commit.finished:
            return self._commit.tokens, self._commit.finished
        if self._writer is not None:
            self._writer.needed = max(self._writer.needed, needed)
        if self._commit.tokens < needed + _AHEAD // 2:
            self.look()
        known, since = self._commit.tokens, time.monotonic()
        while not self._commit.finished and self._commit.tokens < needed:
            _request(self._request_path, needed)
            if self._commit.tokens != known:
                known, since = self._commit.tokens, time.monotonic()
            if time.monotonic() - since > _PATIENCE:
                raise DataError(
                    f"{self.label} has delivered no token for {_PATIENCE / 60:.0f} minutes (after {known} tokens): check the network"
                )
            time.sleep(_POLL)
            self.look()
        return self._commit.tokens, self._commit.finished

    def look(self) -> None:
        """Read the commit, and make sure that a process is appending unless the stream has ended."""
        self._commit = read_commit(self._path, self._dtype.itemsize) or Commit()
        if self._writer is not None and not self._commit.finished:
            self._writer.keep_going()

    def read(self, start: int, count: int) -> npt.NDArray[Any]:
        """See `TokenSource.read`. The tokens must be available already."""
        if len(self._tokens) < self._commit.tokens and (self._commit.finished or start + count > len(self._tokens)):
            self._tokens = map_tokens(self._path, self._dtype, self._commit.tokens)
        return circular(self._tokens, start, count)

    def close(self) -> None:
        """Stop appending after the current batch."""
        if self._writer is not None:
            self._writer.close()


class _Writer:
    """A thread that appends, unless another process does, until the requested tokens and a reserve are available."""

    def __init__(self, text: HubText, encoder: Encoder, path: Path) -> None:
        self.needed = 0
        self._text, self._path = text, path
        self._encoder = copy.deepcopy(encoder)  # a tokenizer must not be shared by two threads
        self._stop = threading.Event()
        self._problem: BaseException | None = None
        self._thread: threading.Thread | None = None

    def keep_going(self) -> None:
        """Start the thread that appends, unless another process or thread already does.

        Raises:
            DataError: appending failed.
        """
        if self._problem is not None:
            raise self._problem
        if self._thread is not None and self._thread.is_alive():
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            handle = try_lock(self._path.with_suffix(".lock"))
        except OSError as problem:
            raise cache_problem(problem, self._path.parent) from None
        if handle is not None:
            self._stop.clear()
            self._thread = threading.Thread(
                target=self._run, args=(handle,), name=f"tokens of {self._text.label}", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=10)

    def _run(self, lock: int) -> None:
        failures = 0
        try:
            while not self._stop.is_set():
                before = read_commit(self._path, self._encoder.dtype.itemsize)
                try:
                    return self._append(before or Commit())
                except Exception as problem:
                    if isinstance(problem, GQAConvertError) and not failures:
                        raise
                    failures = self._again(problem, before, failures)
        except BaseException as problem:
            self._problem = problem
        finally:
            os.close(lock)

    def _again(self, problem: Exception, before: Commit | None, failures: int) -> int:
        """Wait before the next attempt, longer after each consecutive failure."""
        came = (read_commit(self._path, self._encoder.dtype.itemsize) or Commit()).tokens > (before or Commit()).tokens
        failures = 1 if came else failures + 1
        if failures >= _ATTEMPTS:
            reason = str(problem) or type(problem).__name__
            raise DataError(
                f"{self._text.label} was interrupted and could not be reopened ({reason}): check the network"
            ) from problem
        self._stop.wait(2.0 ** (failures - 1))
        return failures

    def _append(self, commit: Commit) -> None:
        """Append tokens from a commit on until the stream ends or `close` is called."""
        if commit.finished:
            return
        counted = _CountedRows(self._text.rows(), commit)
        with self._explained(), self._path.open("ab") as file:
            file.truncate(commit.tokens * self._encoder.dtype.itemsize)  # remove what was written after the last commit
        for batch in batches(counted.pieces(self._text.columns, self._text.label)):
            tokens, _ = self._encoder.encode(batch, begins=True)
            commit = Commit(commit.tokens + len(tokens), counted.rows, False, counted.state())
            with self._explained(), self._path.open("ab") as file:
                file.write(tokens.tobytes())
                file.flush()
                os.fsync(file.fileno())
                _write_commit(self._path, commit)
            while commit.tokens >= max(self.needed, _requested(self._path.with_suffix(".wish"))) + _AHEAD:
                if self._stop.wait(4 * _POLL):
                    return
            if self._stop.is_set():
                return
        if not commit.tokens:
            raise DataError(f"{self._text.label} holds no text: name another dataset, split or `text_field`")
        with self._explained():
            _write_commit(self._path, commit._replace(rows=counted.rows, finished=True, state=None))

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn errors of the disk into a DataError; errors of the stream are handled elsewhere."""
        try:
            yield
        except OSError as problem:
            raise cache_problem(problem, self._path.parent) from None


class _CountedRows:
    """The rows after those of a commit, and a count of all rows read."""

    def __init__(self, source: Any, commit: Commit) -> None:
        self._source = source
        self._knows = hasattr(source, "state_dict") and (commit.state is not None or not commit.rows)
        self.rows = commit.rows
        if commit.rows and self._knows:
            self._source.load_state_dict(commit.state)
        elif commit.rows:
            self._source = source.skip(commit.rows) if hasattr(source, "skip") else _without(source, commit.rows)

    def pieces(self, columns: Columns, label: str) -> Iterator[Piece]:
        for row in self._source:
            self.rows += 1
            yield from columns.pieces(row, f"{label} row {self.rows}")

    def state(self) -> Any:
        """The dataset's position, if the dataset reports one that JSON can represent."""
        if not self._knows:
            return None
        state = self._source.state_dict()
        try:
            return json.loads(json.dumps(state))
        except TypeError:
            return None


def _without(source: Iterable[Mapping[str, Any]], count: int) -> Iterator[Mapping[str, Any]]:
    rows = iter(source)
    for _ in range(count):
        next(rows, None)
    return rows


def read_commit(path: Path, itemsize: int) -> Commit | None:
    """The last commit of a growing file, or None if there is none or the file contradicts it."""
    try:
        found = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        commit = Commit(*found["commit"])
        if (
            found["format"] == FORMAT
            and found["check"] == _check(commit)
            and path.stat().st_size >= commit.tokens * itemsize
        ):
            return commit
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def _write_commit(path: Path, commit: Commit) -> None:
    with atomic_file(path.with_suffix(".json"), path.with_suffix(".json-new")) as file:
        file.write(json.dumps({"format": FORMAT, "commit": commit, "check": _check(commit)}).encode())


def _check(commit: Commit) -> str:
    return hashlib.sha256(json.dumps(commit).encode()).hexdigest()


def _request(path: Path, needed: int) -> None:
    """Leave a note for the writer, in whichever process, of how many tokens a reader waits for. A half-written number
    is merely a smaller one.
    """
    if _requested(path) < needed:
        with contextlib.suppress(OSError):
            path.write_text(str(needed), encoding="utf-8")


def _requested(path: Path) -> int:
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0
