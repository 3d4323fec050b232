"""Documents in local files: plain text, JSON lines, JSON arrays and Parquet, compressed or not."""

import io
import json
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Any

from gqa_convert.data.documents import Fields, Piece, Row, TextField
from gqa_convert.errors import DataError

_JSON = (".jsonl", ".ndjson", ".json")
_PARQUET = (".parquet", ".pq")
_WITH_ROWS = (*_JSON, *_PARQUET)
SUFFIXES = (".txt", ".text", ".md", ".rst", ".py", *_WITH_ROWS)
"""The suffixes of the files that are read from a folder; other files are read as plain text if they are named."""

_COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
PIECE = 1 << 18
"""The characters of a piece of a long text file; pieces are tokenised in parallel."""


class Files:
    """Text files as documents: a text file, a row of JSON lines, of a JSON array or of a Parquet file each.

    Attributes:
        label: the source as the user names it.
        files: the files, in the order in which they are read.
        total_bytes: the sum of their sizes on disk.
        lenient: whether files that are not UTF-8 and short files are skipped.
    """

    is_stream = False

    def __init__(self, label: str, files: Sequence[Path], *, lenient: bool = False) -> None:
        self.label, self.files, self.lenient = label, list(files), lenient
        self._finished = 0
        self._handle: io.BufferedReader | None = None
        try:
            self._stats = [path.stat() for path in self.files]
        except OSError as problem:
            raise _unreadable(Path(str(problem.filename)), problem) from None
        self.total_bytes = sum(stat.st_size for stat in self._stats)

    def identity(self) -> list[Any]:
        """Everything that the documents depend on, as plain data for a cache key."""
        stats = zip(self.files, self._stats, strict=True)
        files = [[os.path.realpath(path), stat.st_size, stat.st_mtime_ns] for path, stat in stats]
        return ["files", files, self.lenient]

    def bytes_read(self) -> int:
        """The bytes read so far."""
        return self._finished + (0 if self._handle is None or self._handle.closed else self._handle.tell())

    def position(self) -> Any:
        """Files are read again from the beginning, which takes little beside tokenising."""
        return None

    def pieces(self, fields: Fields, skip: int = 0, position: Any = None) -> Iterator[Piece]:  # noqa: ARG002
        """The documents, long text files in several pieces.

        Args:
            fields: the fields of JSON and Parquet files.
            skip: the pieces at the beginning that are left out.
            position: see `position`.

        Raises:
            DataError: a file can't be read, a row lacks a field, or plain text has no such fields.
        """
        return islice(self._pieces(fields), skip, None)

    def first_row(self) -> Row:
        """The first row of the first file; empty if it is plain text, has none or can't be read."""
        path = self.files[0]
        if kind_of(path) not in _WITH_ROWS:
            return {}
        try:
            with path.open("rb") as handle, closing(_rows(path, handle, ())) as rows:
                return next(rows)[1]
        except Exception:  # reading the text explains what is wrong with it
            return {}

    def _pieces(self, fields: Fields) -> Iterator[Piece]:
        self._finished = 0
        for path, stat in zip(self.files, self._stats, strict=True):
            with self._explained(path), path.open("rb") as self._handle:
                if kind_of(path) in _WITH_ROWS:
                    for where, row in _rows(path, self._handle, fields.fields):
                        if document := fields.read(row, where):
                            yield Piece(document, where=where)
                elif not isinstance(fields, TextField):
                    raise DataError(
                        f"{path} is plain text, which has no fields ({' and '.join(fields.fields)}): name JSON lines, Parquet files or a dataset"
                    )
                elif self.lenient:
                    text = self._handle.read().decode("utf-8-sig")
                    yield from [Piece(text)] if len(text) > _SHORT else []
                else:
                    with _decompressed(path, self._handle) as lines:
                        yield from _text_pieces(lines)
            self._finished += stat.st_size

    @contextmanager
    def _explained(self, path: Path) -> Iterator[None]:
        """The error about a file, as one line."""
        try:
            yield
        except UnicodeDecodeError as problem:
            if not self.lenient:
                byte = problem.object[problem.start]
                raise DataError(
                    f"{path} is not UTF-8 ({problem.reason}, byte 0x{byte:02x}): convert it, or remove it from the source"
                ) from None
        except OSError as problem:
            raise _unreadable(path, problem) from None


_SHORT = 100
"""Files of so few characters are skipped where the files are only a stock of text."""


def kind_of(path: Path) -> str:
    """The suffix that states a file's format, without the suffix of its compression."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in _COMPRESSED else suffix


def _decompressed(path: Path, handle: io.BufferedReader) -> IO[str]:
    """The text of a file. Lines end with a line feed only, since JSON may hold all other line separators."""
    compression = _COMPRESSED.get(path.suffix.lower())
    if compression is not None:
        import pyarrow as pa

        handle = io.BufferedReader(pa.CompressedInputStream(handle, compression))
    return io.TextIOWrapper(handle, encoding="utf-8-sig", newline="\n")


def _text_pieces(text: IO[str]) -> Iterator[Piece]:
    """A text file as one document, in pieces that end at line ends if possible."""
    pending, first = "", True
    while more := text.read(PIECE):
        pending += more
        while len(pending) > PIECE:
            cut = pending.rfind("\n", 0, PIECE) + 1 or PIECE
            yield Piece(pending[:cut], last=False, first=first)
            pending, first = pending[cut:], False
    if pending:
        yield Piece(pending, first=first)


def _rows(path: Path, handle: io.BufferedReader, fields: Sequence[str]) -> Generator[tuple[str, Row], None, None]:
    """The location of each row of a JSON or Parquet file, for messages, and the row.

    Args:
        path: the path of the file.
        handle: the open file.
        fields: the fields that are read, so that other columns of Parquet files need not be.
    """
    if kind_of(path) in _PARQUET:
        yield from _parquet_rows(path, handle, fields)
        return
    with _decompressed(path, handle) as lines:
        for where, row in _json_values(path, lines):
            if not isinstance(row, dict):
                raise DataError(
                    f"{where} holds a {type(row).__name__}, expected an object with {' and '.join(map(repr, fields))}"
                )
            yield where, row


def _json_values(path: Path, lines: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """The location of each value and the value: one per line, or the items of an array, which is read as a whole."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if line.lstrip().startswith("["):
            yield from _array_items(path, line + "".join(lines))
            return
        try:
            yield f"{path} line {number}", json.loads(line)
        except ValueError as problem:
            raise DataError(
                f"{path} line {number} is not JSON ({problem}): expected one object per line, or one array of objects"
            ) from None


def _array_items(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    try:
        items = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise DataError(
            f"{path} begins like a JSON array but is not one ({problem}): expected one array of objects, or one object per line"
        ) from None
    yield from ((f"{path} item {number}", item) for number, item in enumerate(items, 1))


def _parquet_rows(path: Path, handle: io.BufferedReader, fields: Sequence[str]) -> Iterator[tuple[str, Row]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(handle)
        batches = file.iter_batches(batch_size=256, columns=columns_of(fields, file.schema_arrow.names))
        rows = (row for batch in batches for row in batch.to_pylist())
        yield from ((f"{path} row {number}", row) for number, row in enumerate(rows, 1))
    except (pa.ArrowException, UnicodeDecodeError) as problem:
        raise DataError(
            f"{path} is not a readable Parquet file ({problem}): download it again, or remove it from the source"
        ) from None


def columns_of(fields: Sequence[str], names: Sequence[str]) -> list[str] | None:
    """The columns that hold the fields; None for all columns if one is missing, so that the error can list them."""
    found = {field if field in names else field.partition(".")[0] for field in fields}
    return sorted(found) if found and found <= set(names) else None


def _unreadable(path: Path, problem: OSError) -> DataError:
    return DataError(
        f"{path} can't be read ({problem.strerror or problem}): check the file, or remove it from the source"
    )
