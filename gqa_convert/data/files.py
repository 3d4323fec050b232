"""Documents in local files: plain text, JSON lines, Parquet and Arrow, all of which may be
compressed by gzip.
"""

import csv
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from gqa_convert.data.documents import Fields, Piece, Row
from gqa_convert.errors import DataError

_JSON = (".jsonl", ".json")
_WITH_ROWS = (*_JSON, ".parquet", ".arrow")
DOCUMENTS = (".text", ".md", ".rst", ".py")
"""The suffixes of texts that are no data for `datasets`, so that their names state no split."""
SUFFIXES = (".txt", *DOCUMENTS, *_WITH_ROWS)
"""The suffixes of the files that are read from a folder, before `.gz` if there is one; other files
are read as plain text if they are named.
"""
_BEGINNING = 4096
"""The bytes of a file that show its encoding."""

PIECE = 1 << 18
"""The characters of a piece of a long text file; pieces are tokenised in parallel."""
_SHORT = 100
"""Files of so few characters are skipped where the files are only a stock of text."""


class Files:
    """Text files as documents: a text file, a row of JSON lines or of a Parquet file each.

    Attributes:
        label: the source as the user names it.
        files: the files, in the order in which they are read.
        total_bytes: the sum of their sizes on disk.
        bytes_read: as many as were read so far.
        lenient: whether files that are not UTF-8 and short files are skipped.
    """

    is_stream = False

    def __init__(self, label: str, files: Sequence[Path], *, lenient: bool = False) -> None:
        self.label = label
        self.files = list(files)
        self.lenient = lenient
        self.bytes_read = self.total_bytes = 0
        self._identity: list[Any] = []
        for path in self.files:
            with explained(path):
                stat = path.stat()
            self.total_bytes += stat.st_size
            self._identity.append([os.path.realpath(path), stat.st_size, stat.st_mtime_ns])

    def identity(self) -> list[Any]:
        """Everything that the documents depend on, as plain data for a cache key."""
        return ["files", self._identity, self.lenient]

    def pieces(self, fields: Fields) -> Iterator[Piece]:
        """The documents, long text files in several pieces.

        Args:
            fields: the fields of JSON and Parquet files.

        Raises:
            DataError: a file can't be read, a row lacks a field, or plain text has no such fields.
        """
        finished = 0
        for path, (_, size, _) in zip(self.files, self._identity, strict=True):
            with explained(path), path.open("rb") as handle:
                for piece in self._documents(path, handle, fields):
                    self.bytes_read = finished + handle.tell()
                    yield piece
            finished += size
            self.bytes_read = finished

    def _documents(self, path: Path, handle: io.BufferedReader, fields: Fields) -> Iterator[Piece]:
        if kind_of(path) in _WITH_ROWS:
            for where, row in read_rows(path, handle, fields.names):
                if document := fields.read(row, where):
                    yield Piece(document, where=where)
        elif fields.holds == "row":
            return
        elif fields.holds != "text":
            raise DataError(
                f"{path} is plain text, which has no fields ({' and '.join(fields.names)}): name "
                "JSON lines, Parquet files or a dataset"
            )
        elif self.lenient:
            try:
                text = handle.read().decode("utf-8-sig")
            except UnicodeDecodeError:
                return
            if len(text) > _SHORT:
                yield Piece(text)
        else:
            with _lines(path, handle) as lines:
                yield from _text_pieces(lines)


def kind_of(path: Path) -> str:
    """The suffix of a file, without that of its compression."""
    return Path(path.name.removesuffix(".gz")).suffix.lower()


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """The error about a file, as one line."""
    try:
        yield
    except UnicodeDecodeError as problem:
        raise DataError(
            f"{path} is not UTF-8 ({problem.reason}, byte 0x{problem.object[problem.start]:02x}): "
            "convert it, or remove it from the source"
        ) from None
    except (OSError, EOFError, zlib.error, csv.Error) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise DataError(
            f"{path} can't be read ({reason}): check the file, or remove it from the source"
        ) from None


def _lines(path: Path, handle: io.BufferedReader) -> IO[str]:
    """The text of a file. Lines end with a line feed only, since JSON may hold all other line
    separators.

    Raises:
        DataError: it is UTF-16 or UTF-32, which without a mark may be valid UTF-8 with many nulls.
    """
    data = gzip.GzipFile(fileobj=handle) if path.suffix == ".gz" else handle
    beginning = data.peek(_BEGINNING)[:_BEGINNING]
    if beginning.count(0) > 1 + len(beginning) // 64:
        raise DataError(
            f"{path} is UTF-16 or no text: convert it to UTF-8, or remove it from the source"
        )
    return io.TextIOWrapper(data, encoding="utf-8-sig", newline="\n")


def _text_pieces(text: IO[str]) -> Iterator[Piece]:
    """A text file as one document, in pieces that end at line ends if possible."""
    pending = ""
    first = True
    while more := text.read(PIECE):
        pending += more
        while len(pending) > PIECE:
            cut = pending.rfind("\n", 0, PIECE) + 1 or PIECE
            yield Piece(pending[:cut], last=False, first=first)
            pending = pending[cut:]
            first = False
    if pending:
        yield Piece(pending, first=first)


def read_rows(
    path: Path, handle: io.BufferedReader, fields: Sequence[str]
) -> Iterator[tuple[str, Row]]:
    """The location of each row of a file of JSON lines, of CSV or of a table, for messages, and the
    row.

    Args:
        path: the path of the file.
        handle: the open file.
        fields: the fields that are read, so that other columns of tables need not be.
    """
    if kind_of(path) not in _JSON:
        for number, row in enumerate(_table_rows(path, handle, fields), 1):
            yield f"{path} row {number}", row
        return
    with _lines(path, handle) as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                where = f"{path} line {number}"
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as problem:
                    raise DataError(
                        f"{where} is not JSON ({problem}): expected one object per line"
                    ) from None
                if not isinstance(row, dict):
                    raise DataError(
                        f"{where} holds a {type(row).__name__}, expected one object per line"
                    )
                yield where, row


def _table_rows(path: Path, handle: io.BufferedReader, fields: Sequence[str]) -> Iterator[Row]:
    """The rows of a Parquet file, of an Arrow stream, as `datasets` writes it, or of CSV."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kind = kind_of(path)
    if kind == ".csv":
        with _lines(path, handle) as lines:
            yield from csv.DictReader(lines)
        return
    try:
        batches = pa.ipc.open_stream(handle) if kind == ".arrow" else pq.ParquetFile(handle)
        if kind == ".parquet":
            columns = columns_of(fields, batches.schema_arrow.names)
            batches = batches.iter_batches(256, columns=columns)
        for batch in batches:
            yield from batch.to_pylist()
    except (pa.ArrowException, UnicodeDecodeError) as problem:
        raise DataError(
            f"{path} is not a readable {kind[1:].capitalize()} file ({problem}): download it "
            "again, or remove it from the source"
        ) from None


def columns_of(fields: Sequence[str], names: Sequence[str]) -> list[str] | None:
    """The columns that hold the fields; None for all columns if one is missing, so that the error
    can list them.
    """
    found = {field.partition(".")[0] for field in fields}
    return sorted(found) if found and found <= set(names) else None
