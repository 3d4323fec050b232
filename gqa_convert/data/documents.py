"""Documents, and the fields of a row that hold one: a text, a conversation, or a pair of texts."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from gqa_convert.errors import DataError

PAIR_KEYS = "`source_field` and `target_field`"

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
