"""Documents in local files: plain text, JSON lines, JSON arrays and Parquet, compressed or not."""

import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from gqa_convert.errors import DataError
from gqa_convert.text.documents import PAIR_KEYS, Columns, Piece, TextColumn, pair_columns

_JSON_LINES = (".jsonl", ".ndjson", ".json")
_PARQUET = (".parquet", ".pq")
SUFFIXES = (".txt", ".text", ".md", ".rst", ".py", *_JSON_LINES, *_PARQUET)
"""The suffixes of the files that are read from a folder; other files are read as plain text if they are named."""

_COMPRESSED = (".gz", ".zst")
PIECE = 1 << 18
"""The characters of a piece of a long text file; pieces are tokenised in parallel by the tokenizer's threads."""


class FileText:
    """Text files as an iterator of documents.

    A document is a text file, a line of a JSON-lines file, an item of a JSON array or a row of a Parquet file. Empty
    documents are skipped.

    Attributes:
        files: the files, in the order in which they are read.
        columns: the columns that hold the documents of JSON and Parquet files; a name is that of a column of text.
        sizes: their sizes on disk, in bytes.
        total_bytes: the sum of the sizes.
        lenient: whether files that are not UTF-8 and short files are skipped.
    """

    def __init__(self, label: str, files: Sequence[Path], columns: Columns | str, *, lenient: bool = False) -> None:
        self.label, self.files = label, list(files)
        self.columns: Columns = TextColumn(columns) if isinstance(columns, str) else columns
        self.lenient = lenient
        self._finished = 0
        self._handle: io.BufferedReader | None = None
        try:
            self._stats = [path.stat() for path in self.files]
        except OSError as problem:
            raise _unreadable(Path(str(problem.filename)), problem) from None
        self.sizes = [stat.st_size for stat in self._stats]
        self.total_bytes = sum(self.sizes)

    def identity(self) -> list[Any]:
        """Everything that the documents depend on, as plain data for a cache key."""
        files = [
            [os.path.realpath(path), stat.st_size, stat.st_mtime_ns]
            for path, stat in zip(self.files, self._stats, strict=True)
        ]
        return ["files", files, self.columns.identity(), self.lenient]

    def bytes_read(self) -> int:
        """The bytes read so far."""
        return self._finished + (0 if self._handle is None or self._handle.closed else self._handle.tell())

    def __iter__(self) -> Iterator[Piece]:
        self._finished = 0
        for number, size in enumerate(self.sizes):
            yield from self.read(number)
            self._finished += size

    def read(self, number: int, start: int = 0, stop: int | None = None) -> Iterator[Piece]:
        """The documents of a file, or of a part of it.

        Args:
            number: the number of the file.
            start: the first byte, where a line or a piece begins; of Parquet files the first row group.
            stop: the end, exclusive; None for the end of the file. Parts of compressed files, of JSON arrays and of
                `lenient` texts can't be read.

        Raises:
            DataError: the file can't be read, or a document lacks the field.
        """
        path = self.files[number]
        with self.explained(path):
            yield from self._read(path, start, stop)

    def first_fields(self) -> list[str]:
        """The fields of the first row of the first file; none if it is plain text, empty or can't be read."""
        path = self.files[0]
        try:
            with path.open("rb") as handle:
                if kind_of(path) in _PARQUET:
                    import pyarrow.parquet as pq

                    return list(pq.read_schema(handle).names)
                if kind_of(path) not in _JSON_LINES:
                    return []
                with _decompressed(path, handle) as raw, io.TextIOWrapper(raw, encoding="utf-8-sig") as text:
                    _, row = next(_json_values(path, iter(text)))
                    return list(row)
        except Exception:  # reading the text explains what is wrong with it
            return []

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
            with self.explained(path), path.open("rb") as self._handle:
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
    def explained(self, path: Path) -> Iterator[None]:
        """The error about a file, as one line."""
        try:
            yield
        except UnicodeDecodeError as problem:
            if not self.lenient:
                byte = problem.object[problem.start]
                raise DataError(
                    f"{path} is not UTF-8 ({problem.reason}, byte 0x{byte:02x}): convert it, or remove it from the source"
                ) from None
        except (EOFError, gzip.BadGzipFile, zlib.error) as problem:
            raise DataError(f"{path} is damaged ({problem}): download it again, or remove it from the source") from None
        except OSError as problem:
            raise _unreadable(path, problem) from None

    def _read(self, path: Path, start: int, stop: int | None) -> Iterator[Piece]:
        kind = kind_of(path)
        with path.open("rb") as self._handle:
            if kind in _PARQUET:
                yield from self._parquet(path, self._handle, start, stop)
                return
            whole = start == 0 and stop is None
            encoding = "utf-8" if start else "utf-8-sig"
            with (
                _decompressed(path, self._handle) if whole else _section(self._handle, start, stop) as raw,
                io.TextIOWrapper(raw, encoding=encoding, newline="") as text,
            ):
                if self.lenient:
                    content = text.read()
                    yield from [Piece(content)] if len(content) > 100 else []
                elif kind in _JSON_LINES:
                    yield from self._json_lines(path, text, start)
                elif not isinstance(self.columns, TextColumn):
                    raise DataError(
                        f"{path} is plain text, which holds no conversations: name JSON lines or Parquet files, or remove `format: chat`"
                    )
                else:
                    ends = whole or stop == path.stat().st_size
                    yield from text_pieces(text, ends=ends)

    def _json_lines(self, path: Path, lines: Iterable[str], start: int) -> Iterator[Piece]:
        for where, row in self._json_rows(path, lines, self.columns.name, start):
            yield from self.columns.pieces(row, where)

    def _json_rows(
        self, path: Path, lines: Iterable[str], field: str, start: int = 0
    ) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for where, row in _json_values(path, iter(lines), start):
            if not isinstance(row, dict):
                raise DataError(f"{where} holds a {type(row).__name__}, expected an object with the field {field!r}")
            yield where, row

    def _parquet(self, path: Path, handle: io.BufferedReader, start: int, stop: int | None) -> Iterator[Piece]:
        def columns(names: Sequence[str]) -> list[str]:
            return self.columns.columns(str(path), names)

        for where, row in self._parquet_rows(path, handle, columns, start, stop):
            yield from self.columns.pieces(row, where)

    def _parquet_rows(
        self,
        path: Path,
        handle: io.BufferedReader,
        columns: Callable[[Sequence[str]], list[str]],
        start: int = 0,
        stop: int | None = None,
    ) -> Iterator[tuple[str, Mapping[str, Any]]]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            file = pq.ParquetFile(handle)
            groups = range(file.num_row_groups)[start:stop]
            names = columns(file.schema_arrow.names)
            for batch in file.iter_batches(batch_size=256, row_groups=groups, columns=names):
                yield from ((str(path), row) for row in batch.to_pylist())
        except (pa.ArrowException, UnicodeDecodeError) as problem:
            raise DataError(
                f"{path} is not a readable Parquet file ({problem}): download it again, or remove it from the source"
            ) from None


def _json_values(path: Path, lines: Iterator[str], start: int = 0) -> Iterator[tuple[str, Any]]:
    """The location of each value in a file, for messages, and the value: one per line, or the items of an array, which
    is read as a whole.

    Args:
        path: the path of the file.
        lines: its lines.
        start: the byte at which they begin.
    """
    after = f" (from byte {start} on)" if start else ""
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
                f"{path} line {number}{after} is not JSON ({problem}): expected one object per line, or one array of objects"
            ) from None
        yield f"{path} line {number}{after}", row


def _array_items(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    try:
        items = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise DataError(
            f"{path} begins like a JSON array but is not one ({problem}): expected one array of objects, or one object per line"
        ) from None
    yield from ((f"{path} item {number}", item) for number, item in enumerate(items, 1))


def text_pieces(text: IO[str], *, ends: bool = True) -> Iterator[Piece]:
    """A text file as one document, in pieces that end at line ends if possible.

    Args:
        text: the file, or a part that begins with a piece.
        ends: whether the document ends with the last piece.
    """
    pending = ""
    while True:
        more = text.read(PIECE)
        if not more:
            break
        pending += more
        while len(pending) > PIECE:  # all of them, so that a part of the file is cut where the whole file is
            cut = pending.rfind("\n", 0, PIECE) + 1 or PIECE
            yield Piece(pending[:cut], last=False)
            pending = pending[cut:]
    if pending:
        yield Piece(pending, last=ends)


def kind_of(path: Path) -> str:
    """The suffix that states a file's format, without the suffix of its compression."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in _COMPRESSED else suffix


def _section(handle: io.BufferedReader, start: int, stop: int | None) -> io.BufferedReader:
    """The bytes of a file from `start` to `stop`."""
    handle.seek(start)
    return io.BufferedReader(_Section(handle, None if stop is None else stop - start))


class _Section(io.RawIOBase):
    """The next bytes of a file, as a file of their own."""

    def __init__(self, handle: io.BufferedReader, left: int | None) -> None:
        self._handle, self._left = handle, left

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        wanted = memoryview(buffer)
        if self._left is not None:
            wanted = wanted[: self._left]
        count = self._handle.readinto(wanted)
        if self._left is not None:
            self._left -= count
        return count


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
