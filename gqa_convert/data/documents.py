"""Documents, and the fields of a row that hold one: a text, a conversation, or a pair of texts."""

from collections.abc import Mapping
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


class Fields(NamedTuple):
    """The fields of a row that hold a document.

    Attributes:
        names: of the fields. `translation.en` is the entry `en` of the field `translation`, unless a field has that full
            name.
        holds: a text; a pair of what the encoder reads and what the decoder learns to write; messages, a list of objects
            with `role` and `content`, or with `from` and `value`; or a prompt and its response in two fields.
    """

    names: tuple[str, ...] = ("text",)
    holds: Literal["text", "pair", "messages", "prompt"] = "text"

    def read(self, row: Row, where: str) -> Any:
        """The document of a row: a text, empty where it is null; two of them; or the messages of a conversation in the
        form that chat templates read, none if they are null or one side is empty.

        Raises:
            DataError: the row has no such field, or something else in it.
        """
        if self.holds == "messages":
            return _messages(row, self.names[0], where)
        keys = "`text_field`" if self.holds == "text" else PAIR_KEYS
        texts = tuple(_text(row, name, where, keys) for name in self.names)
        if self.holds == "prompt":
            turns = zip(("user", "assistant"), texts, strict=True)
            return [{"role": role, "content": text} for role, text in turns] if all(texts) else []
        return texts if self.holds == "pair" else texts[0]


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


def _messages(row: Row, field: str, where: str) -> list[Message]:
    advice = f"name the list of messages with `messages_field`, or a prompt and its response with {PAIR_KEYS}"
    messages = _value(row, field, where, advice)
    if not isinstance(messages, list | None):
        raise DataError(
            f"{where}: {field!r} holds a {type(messages).__name__}, expected a list of messages: name another field with `messages_field`"
        )
    return [_message(item, f"{where}: message {number}") for number, item in enumerate(messages or (), 1)]


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
    if isinstance(content, str):
        found["content"] = well_formed(content)
    elif not isinstance(content, list) and "tool_calls" not in found:
        raise DataError(f"{where} of the role {found['role']} has no `content`: correct the row")
    return found


def well_formed(text: str) -> str:
    """The text with lone surrogates replaced, which JSON can represent and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
