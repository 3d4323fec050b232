"""Documents in local files: plain text, JSON lines, JSON arrays and Parquet, compressed or not."""

import gzip
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from gqa_convert.errors import DataError
from gqa_convert.text.documents import PAIR_KEYS, Piece, no_field, pair_columns, row_pieces

_JSON_LINES = (".jsonl", ".ndjson", ".json")
_PARQUET = (".parquet", ".pq")
SUFFIXES = (".txt", ".text", ".md", ".rst", ".py", *_JSON_LINES, *_PARQUET)
"""The suffixes of the files that are read from a folder; other files are read as plain text if they are named."""

_COMPRESSED = (".gz", ".zst")
_PIECE = 1 << 18
"""The characters of a piece of a long text file; pieces are tokenised in parallel by the tokenizer's threads."""


class FileText:
    """Text files as an iterator of documents.

    A document is a text file, a line of a JSON-lines file, an item of a JSON array or a row of a Parquet file. Empty
    documents are skipped.

    Attributes:
        files: the files, in the order in which they are read.
        total_bytes: their size on disk.
    """

    def __init__(self, label: str, files: Sequence[Path], text_field: str, *, lenient: bool = False) -> None:
        self.label, self.files, self.text_field = label, list(files), text_field
        self._lenient = lenient
        self._finished = 0
        self._handle: io.BufferedReader | None = None
        try:
            self._stats = [path.stat() for path in self.files]
        except OSError as problem:
            raise _unreadable(Path(str(problem.filename)), problem) from None
        self.total_bytes = sum(stat.st_size for stat in self._stats)

    def identity(self) -> list[Any]:
        """Everything that the documents depend on, as plain data for a cache key."""
        files = [
            [os.path.realpath(path), stat.st_size, stat.st_mtime_ns]
            for path, stat in zip(self.files, self._stats, strict=True)
        ]
        return ["files", files, self.text_field, self._lenient]

    def bytes_read(self) -> int:
        """The bytes read so far."""
        return self._finished + (0 if self._handle is None or self._handle.closed else self._handle.tell())

    def __iter__(self) -> Iterator[Piece]:
        self._finished = 0
        for path, stat in zip(self.files, self._stats, strict=True):
            with self._explained(path):
                yield from self._read(path)
            self._finished += stat.st_size

    def rows(self, fields: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """The location of each row of JSON-lines and Parquet files, for messages, and the given fields, as far as the
        row has them.

        Args:
            fields: the fields of pairs.

        Raises:
            DataError: a file can't be read, lacks a field, or is plain text, which has no fields.
        """
        self._finished = 0
        for path, stat in zip(self.files, self._stats, strict=True):
            with self._explained(path), path.open("rb") as self._handle:
                yield from self._rows(path, self._handle, fields)
            self._finished += stat.st_size

    def _rows(
        self, path: Path, handle: io.BufferedReader, fields: Sequence[str]
    ) -> Iterator[tuple[str, Mapping[str, Any]]]:
        kind = kind_of(path)
        if kind in _PARQUET:
            yield from self._parquet_rows(path, handle, lambda names: pair_columns(str(path), fields, names))
            return
        if kind not in _JSON_LINES:
            raise DataError(
                f"{path} is plain text, which has no fields {' and '.join(fields)}: name JSON lines, Parquet or a dataset, or remove "
                f"{PAIR_KEYS}"
            )
        with _decompressed(path, handle) as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as text:
            yield from self._json_rows(path, text, fields[0])

    @contextmanager
    def _explained(self, path: Path) -> Iterator[None]:
        """The error about a file, as one line."""
        try:
            yield
        except UnicodeDecodeError as problem:
            if not self._lenient:
                byte = problem.object[problem.start]
                raise DataError(
                    f"{path} is not UTF-8 ({problem.reason}, byte 0x{byte:02x}): convert it, or remove it from the source"
                ) from None
        except (EOFError, gzip.BadGzipFile) as problem:
            raise DataError(f"{path} is damaged ({problem}): download it again, or remove it from the source") from None
        except OSError as problem:
            raise _unreadable(path, problem) from None

    def _read(self, path: Path) -> Iterator[Piece]:
        kind = kind_of(path)
        with path.open("rb") as self._handle:
            if kind in _PARQUET:
                yield from self._parquet(path, self._handle)
                return
            with (
                _decompressed(path, self._handle) as raw,
                io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as text,
            ):
                if self._lenient:
                    whole = text.read()
                    yield from [Piece(whole)] if len(whole) > 100 else []
                else:
                    yield from self._json_lines(path, text) if kind in _JSON_LINES else _pieces(text)

    def _json_lines(self, path: Path, lines: Iterable[str]) -> Iterator[Piece]:
        for where, row in self._json_rows(path, lines, self.text_field):
            yield from row_pieces(row, self.text_field, where)

    def _json_rows(self, path: Path, lines: Iterable[str], field: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for where, row in _json_values(path, iter(lines)):
            if not isinstance(row, dict):
                raise DataError(f"{where} holds a {type(row).__name__}, expected an object with the field {field!r}")
            yield where, row

    def _parquet(self, path: Path, handle: io.BufferedReader) -> Iterator[Piece]:
        def column(names: Sequence[str]) -> list[str]:
            if self.text_field not in names:
                raise no_field(str(path), self.text_field, names)
            return [self.text_field]

        for where, row in self._parquet_rows(path, handle, column):
            yield from row_pieces(row, self.text_field, where)

    def _parquet_rows(
        self, path: Path, handle: io.BufferedReader, columns: Callable[[Sequence[str]], list[str]]
    ) -> Iterator[tuple[str, Mapping[str, Any]]]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            file = pq.ParquetFile(handle)
            for batch in file.iter_batches(batch_size=256, columns=columns(file.schema_arrow.names)):
                yield from ((str(path), row) for row in batch.to_pylist())
        except (pa.ArrowException, UnicodeDecodeError) as problem:
            raise DataError(
                f"{path} is not a readable Parquet file ({problem}): download it again, or remove it from the source"
            ) from None


def _json_values(path: Path, lines: Iterator[str]) -> Iterator[tuple[str, Any]]:
    """The location of each value in a file, for messages, and the value: one per line, or the items of an array, which
    is read as a whole.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if line.lstrip().startswith("["):
            yield from _array_items(path, line + "".join(lines))
            return
        try:
            row = json.loads(line)
        except ValueError as problem:
            raise DataError(
                f"{path} line {number} is not JSON ({problem}): expected one object per line, or one array of objects"
            ) from None
        yield f"{path} line {number}", row


def _array_items(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    try:
        items = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise DataError(
            f"{path} begins like a JSON array but is not one ({problem}): expected one array of objects, or one object per line"
        ) from None
    yield from ((f"{path} item {number}", item) for number, item in enumerate(items, 1))


def _pieces(text: IO[str]) -> Iterator[Piece]:
    """A text file as one document, in pieces that end at line ends if possible."""
    pending = ""
    while True:
        more = text.read(_PIECE)
        if not more:
            break
        pending += more
        if len(pending) > _PIECE:
            cut = pending.rfind("\n", 0, _PIECE) + 1 or _PIECE
            yield Piece(pending[:cut], last=False)
            pending = pending[cut:]
    if pending:
        yield Piece(pending)


def kind_of(path: Path) -> str:
    """The suffix that states a file's format, without the suffix of its compression."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in _COMPRESSED else suffix


def _decompressed(path: Path, handle: io.BufferedReader) -> io.BufferedReader:
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=handle))
    if suffix == ".zst":
        import pyarrow as pa

        return io.BufferedReader(pa.CompressedInputStream(handle, "zstd"))
    return handle


def _unreadable(path: Path, problem: OSError) -> DataError:
    return DataError(
        f"{path} can't be read ({problem.strerror or problem}): check the file, or remove it from the source"
    )
