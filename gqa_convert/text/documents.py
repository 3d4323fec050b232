"""Documents, and the rows that hold them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from gqa_convert.errors import DataError

PAIR_KEYS = "`source_field` and `target_field`"


class Piece(NamedTuple):
    """A document, or a part of a long document."""

    text: str
    last: bool = True


class Columns(Protocol):
    """The columns that hold the documents of a source."""

    @property
    def name(self) -> str:
        """The first column, for messages."""

    def identity(self) -> Any:
        """Everything that the pieces depend on besides the rows, as plain data."""

    def columns(self, where: str, names: Sequence[str]) -> list[str]:
        """The columns to read; raises DataError if one is missing."""

    def pieces(self, row: Mapping[str, Any], where: str) -> list[Piece]:
        """The document in a row; raises DataError if the row does not hold one."""


@dataclass(frozen=True, slots=True)
class TextColumn:
    """The column of running text."""

    name: str = "text"

    def identity(self) -> str:
        """Everything that the pieces depend on besides the rows."""
        return self.name

    def columns(self, where: str, names: Sequence[str]) -> list[str]:
        """The column to read.

        Raises:
            DataError: there is no such column.
        """
        if self.name not in names:
            raise no_field(where, self.name, names)
        return [self.name]

    def pieces(self, row: Mapping[str, Any], where: str) -> list[Piece]:
        """See `row_pieces`."""
        return row_pieces(row, self.name, where)


def row_pieces(row: Mapping[str, Any], text_field: str, where: str) -> list[Piece]:
    """The document in a row, as pieces; no pieces if it is empty or null.

    Raises:
        DataError: the row has no such field, or the field is not text.
    """
    if text_field not in row:
        raise no_field(where, text_field, list(row))
    text = row[text_field]
    if text is None or text == "":
        return []
    if not isinstance(text, str):
        raise DataError(
            f"{where}: {text_field!r} holds a {type(text).__name__}, expected text: name another field with `text_field`"
        )
    return [Piece(text)]


def no_field(where: str, text_field: str, names: Sequence[str]) -> DataError:
    found = ", ".join(map(str, names[:20])) or "nothing"
    chats = ", or set `format: chat` if it holds conversations" if {"messages", "conversations"} & {*names} else ""
    return DataError(
        f"{where} has no {text_field!r}, found {found}: name the field that holds the text with `text_field`{chats}"
    )


def pair_columns(where: str, fields: Sequence[str], names: Sequence[str]) -> list[str]:
    """The distinct columns that hold the fields of pairs; the column of `translation.en` is `translation`.

    Raises:
        DataError: there is no such column.
    """
    columns = []
    for field in fields:
        column = next((name for name in (field, field.partition(".")[0]) if name in names), None)
        if column is None:
            found = ", ".join(map(str, names[:20])) or "nothing"
            raise DataError(f"{where} has no {field!r}, found {found}: name the fields with {PAIR_KEYS}")
        columns.append(column)
    return list(dict.fromkeys(columns))


def well_formed(text: str) -> str:
    """The text with lone surrogates replaced, which JSON can represent and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
