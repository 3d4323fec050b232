"""Documents, and the rows that hold them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gqa_convert.errors import DataError

PAIR_KEYS = "`source_field` and `target_field`"


class Piece(NamedTuple):
    """A document, or a part of a long document."""

    text: str
    last: bool = True


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
    return DataError(
        f"{where} has no {text_field!r}, found {found}: name the field that holds the text with `text_field`"
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
