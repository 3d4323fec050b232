"""Documents, and the fields of a row that hold one: a text, a conversation, or a pair of texts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from gqa_convert.errors import DataError

PAIR_KEYS = "`source_field` and `target_field`"
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}
"""The roles of rows with `from` and `value`, where chat templates have other names."""

LossOn = Literal["assistant", "all"]
"""Which tokens of a conversation are learned."""
Row = Mapping[str, Any]
Message = dict[str, Any]


class Piece(NamedTuple):
    """A document, or a part of a long text.

    Attributes:
        text: the text; of a conversation its messages, of a pair both texts.
        last, first: whether the document ends and begins with this piece.
        where: its location, for messages.
    """

    text: Any
    last: bool = True
    first: bool = True
    where: str = ""


@dataclass(frozen=True, slots=True)
class TextField:
    """The field of running text."""

    name: str = "text"

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that are read."""
        return (self.name,)

    def read(self, row: Row, where: str) -> str:
        """The text of a row; empty where it is null.

        Raises:
            DataError: the row has no such field, or something else than text in it.
        """
        return _text(row, self.name, where, "`text_field`")


@dataclass(frozen=True, slots=True)
class PairFields:
    """The fields of pairs: what the encoder reads, and what the decoder learns to write.

    `translation.en` is the entry `en` of the field `translation`, unless a field has that full name.
    """

    source: str
    target: str

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that are read."""
        return self.source, self.target

    def read(self, row: Row, where: str) -> tuple[str, str]:
        """Both texts of a row; each is empty where it is null.

        Raises:
            DataError: as `TextField.read`.
        """
        return _text(row, self.source, where, PAIR_KEYS), _text(row, self.target, where, PAIR_KEYS)


@dataclass(frozen=True, slots=True)
class ChatFields:
    """The fields of conversations: a list of messages, or one prompt and its response.

    Attributes:
        messages: the field of a list of objects with `role` and `content`, or with `from` and `value`.
        pair: the fields of the user's and the assistant's text; None where rows hold messages.
    """

    messages: str = "messages"
    pair: PairFields | None = None

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that are read."""
        return (self.messages,) if self.pair is None else self.pair.fields

    def read(self, row: Row, where: str) -> list[Message]:
        """The messages of a row in the form that chat templates read; none if they are null or a side is empty.

        Raises:
            DataError: the row has no such field, or something else in it.
        """
        if self.pair is not None:
            prompt, response = self.pair.read(row, where)
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
            return turns if prompt and response else []
        advice = f"name the list of messages with `messages_field`, or a prompt and its response with {PAIR_KEYS}"
        messages = _value(row, self.messages, where, advice)
        if not isinstance(messages, list | None):
            raise DataError(
                f"{where}: {self.messages!r} holds a {type(messages).__name__}, expected a list of messages: name another field with `messages_field`"
            )
        return [_message(item, f"{where}: message {number}") for number, item in enumerate(messages or (), 1)]


Fields = TextField | PairFields | ChatFields


def _value(row: Row, field: str, where: str, advice: str) -> Any:
    if field in row:
        return row[field]
    outer, _, inner = field.partition(".")
    if inner and isinstance(row.get(outer), Mapping):
        return _value(row[outer], inner, f"{where}: {outer!r}", advice)
    found = ", ".join(map(str, list(row)[:20])) or "nothing"
    raise DataError(f"{where} has no {field!r}, found {found}: {advice}")


def _text(row: Row, field: str, where: str, keys: str) -> str:
    advice = f"name the fields with {keys}"
    if {"messages", "conversations"} & row.keys():
        advice += ", or set `format: chat` if it holds conversations"
    value = _value(row, field, where, advice)
    if not isinstance(value, str | None):
        raise DataError(
            f"{where}: {field!r} holds a {type(value).__name__}, expected text: name another field with {keys}"
        )
    return well_formed(value or "")


def _message(item: Any, where: str) -> Message:
    """A message without the fields that a Parquet file fills with nulls."""
    if not isinstance(item, Mapping):
        raise DataError(f"{where} is a {type(item).__name__}, expected an object with `role` and `content`")
    found = {name: value for name, value in item.items() if value is not None}
    if "role" not in found and "from" in found:
        sender = found.pop("from")
        found |= {"role": _ROLES.get(sender, sender), "content": found.pop("value", None)}
    if not isinstance(found.get("role"), str):
        raise DataError(f"{where} has no `role`, found {', '.join(map(str, item)) or 'nothing'}: correct the row")
    content = found.get("content")
    if not isinstance(content, str | list) and "tool_calls" not in found:
        raise DataError(f"{where} of the role {found['role']} has no `content`: correct the row")
    if isinstance(content, str):
        found["content"] = well_formed(content)
    return found


def well_formed(text: str) -> str:
    """The text with lone surrogates replaced, which JSON can represent and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
