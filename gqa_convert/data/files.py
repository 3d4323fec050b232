"""Documents: the fields of a row that hold one, and local files of them.

A document is a text, a conversation or a pair of texts. Files are plain text, JSON lines, Parquet
and Arrow, all of which may be compressed by gzip.
"""

import csv
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from gqa_convert.errors import DataError

PAIR_KEYS = "`source_field` and `target_field`"
"""Of a recipe, which name the fields of pairs."""
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


Row = Mapping[str, Any]
Message = dict[str, Any]


class FieldError(DataError):
    """A row has no such field, or no text in it; how another field is named depends on the
    command.
    """


class Piece(NamedTuple):
    """A document, or a part of a long text.

    Attributes:
        text: the text; of a conversation its messages, of a pair both texts.
        last, first: whether the document ends and begins with this piece.
        where: its location, for messages.
        is_rendered: whether it is a conversation as a chat template writes it, with special tokens.
    """

    text: Any
    last: bool = True
    first: bool = True
    where: str = ""
    is_rendered: bool = False


class Fields(NamedTuple):
    """The fields of a row that hold a document.

    Attributes:
        names: of the fields. `translation.en` is the entry `en` of the field `translation`, unless
            a field has that full name.
        holds: a text; a pair of what the encoder reads and what the decoder learns to write;
            messages, a list of objects with `role` and `content`; or whatever the row holds, which
            plain text has none of.
    """

    names: tuple[str, ...] = ("text",)
    holds: Literal["text", "pair", "messages", "row"] = "text"

    def read(self, row: Row, where: str) -> Any:
        """The document of a row: a text, empty where it is null; two of them; or the messages of a
        conversation in the form that chat templates read, none if they are null.

        Raises:
            DataError: the row has no such field, or something else in it.
        """
        if self.holds == "row":
            return row
        if self.holds == "messages":
            return _messages(row, self.names[0], where)
        texts = tuple(_text(row, name, where) for name in self.names)
        return texts if self.holds == "pair" else texts[0]


def _value(row: Row, field: str, where: str) -> Any:
    if field in row:
        return row[field]
    outer, _, inner = field.partition(".")
    if isinstance(row.get(outer), Mapping):
        return _value(row[outer], inner, f"{where}: {outer!r}")
    found = ", ".join(map(str, row)) or "nothing"
    raise FieldError(f"{where} has no {field!r}, found {found}: rename the field")


def _text(row: Row, field: str, where: str) -> str:
    value = _value(row, field, where)
    if not isinstance(value, str | None):
        raise FieldError(
            f"{where}: {field!r} holds a {type(value).__name__}, expected text: rename the field "
            "of the text"
        )
    return _well_formed(value or "")


def _messages(row: Row, field: str, where: str) -> list[Message]:
    """The messages without the fields that a Parquet file fills with nulls."""
    given = _value(row, field, where)
    if not isinstance(given, list | None):
        raise DataError(
            f"{where}: {field!r} holds a {type(given).__name__}, expected a list of messages"
        )
    messages = []
    for number, item in enumerate(given or (), 1):
        place = f"{where}: message {number}"
        if not isinstance(item, Mapping):
            raise DataError(
                f"{place} is a {type(item).__name__}, expected an object with `role` and `content`"
            )
        message = {name: value for name, value in item.items() if value is not None}
        lacking = "" if isinstance(message.get("role"), str) else "`role`"
        if not {"content", "tool_calls"} & message.keys():
            lacking = lacking or "`content`"
        if lacking:
            raise DataError(
                f"{place} has no {lacking}, found {', '.join(map(str, item)) or 'nothing'}: "
                "correct the row"
            )
        if isinstance(message.get("content"), str):
            message["content"] = _well_formed(message["content"])
        messages.append(message)
    return messages


def _well_formed(text: str) -> str:
    """The text with lone surrogates, which JSON can represent and UTF-8 cannot, as question
    marks.
    """
    return text.encode(errors="replace").decode()


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
