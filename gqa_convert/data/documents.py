"""Documents, and the rows that hold them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gqa_convert.errors import DataError


class Piece(NamedTuple):
    """A document, or a part of a long one."""

    text: str
    last: bool = True


def row_pieces(row: Mapping[str, Any], text_field: str, where: str) -> list[Piece]:
    """The document in a row; none if it is empty or null.

    Raises:
        DataError: the row has no such field, or it is no text.
    """
    if text_field not in row:
        raise no_field(where, text_field, list(row))
    text = row[text_field]
    if text is None or text == "":
        return []
    if not isinstance(text, str):
        raise DataError(f"{where}: {text_field!r} holds a {type(text).__name__}, expected text: name another field with `text_field`")
    return [Piece(text)]


def no_field(where: str, text_field: str, names: Sequence[str]) -> DataError:
    found = ", ".join(map(str, names[:20])) or "nothing"
    return DataError(f"{where} has no {text_field!r}, found {found}: name the field that holds the text with `text_field`")
