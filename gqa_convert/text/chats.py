"""Conversations in the rows of a data source."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gqa_convert.errors import DataError
from gqa_convert.text.documents import Piece, pair_columns, well_formed

_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}
"""The roles of rows with `from` and `value`, where chat templates have other names."""

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChatColumns:
    """The columns that hold a conversation: a list of messages, or one prompt and its response.

    Attributes:
        messages: the field of a list of objects with `role` and `content`, or with `from` and `value`.
        prompt: the field of the user's text; None where rows hold messages.
        response: the field of the assistant's text.
    """

    messages: str = "messages"
    prompt: str | None = None
    response: str | None = None

    def identity(self) -> list[Any]:
        """Everything that the pieces depend on besides the rows."""
        return ["chat", self.messages, self.prompt, self.response]

    @property
    def name(self) -> str:
        """The first field, for messages."""
        return self.prompt or self.messages

    def columns(self, where: str, names: Sequence[str]) -> list[str]:
        """The columns to read.

        Raises:
            DataError: there is no such column.
        """
        if self.prompt is not None and self.response is not None:
            return pair_columns(where, (self.prompt, self.response), names)
        if self.messages not in names:
            raise _no_messages(where, self.messages, names)
        return [self.messages]

    def pieces(self, row: Mapping[str, Any], where: str) -> list[Piece]:
        """The conversation of a row, as one piece that `conversation` reads; no pieces if it is empty.

        Raises:
            DataError: the row has no such field, or something else is in it.
        """
        self.columns(where, list(row))
        messages = self._messages(row, where)
        if not messages:
            return []
        return [Piece(well_formed(json.dumps([where, messages], ensure_ascii=False, default=str)))]

    def _messages(self, row: Mapping[str, Any], where: str) -> list[Message]:
        if self.prompt is not None and self.response is not None:
            texts = [_entry(row, field) for field in (self.prompt, self.response)]
            if not all(isinstance(text, str) or text is None for text in texts):
                raise DataError(
                    f"{where}: {self.prompt!r} or {self.response!r} holds no text: name other fields with source_field and target_field"
                )
            return _two_turns(*texts) if all(texts) else []
        value = row[self.messages]
        if not isinstance(value, list | None):
            raise DataError(
                f"{where}: {self.messages!r} holds a {type(value).__name__}, expected a list of messages: name another field with `messages_field`"
            )
        return [_message(item, f"{where}: message {number}") for number, item in enumerate(value or (), 1)]


def _two_turns(prompt: str, response: str) -> list[Message]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]


def _entry(row: Mapping[str, Any], field: str) -> Any:
    """The value of a field; `translation.en` is the entry `en` of the field `translation`."""
    if field in row:
        return row[field]
    outer, _, inner = field.partition(".")
    within = row[outer]
    return _entry(within, inner) if isinstance(within, Mapping) and inner in within else None


def _message(item: Any, where: str) -> Message:
    """A message in the form that chat templates read, without the fields that a Parquet file fills with nulls."""
    if not isinstance(item, Mapping):
        raise DataError(f"{where} is a {type(item).__name__}, expected an object with `role` and `content`")
    found = {name: value for name, value in item.items() if value is not None}
    if "role" not in found and "from" in found:
        sender = found.pop("from")
        found |= {"role": _ROLES.get(sender, sender), "content": found.pop("value", None)}
    if not isinstance(found.get("role"), str):
        raise DataError(f"{where} has no `role`, found {', '.join(map(str, item)) or 'nothing'}: correct the row")
    if not isinstance(found.get("content"), str | list) and "tool_calls" not in found:
        raise DataError(f"{where} of the role {found['role']} has no `content`: correct the row")
    return found


def conversation(piece: Piece) -> tuple[str, list[Message]]:
    """The location of a row, for messages, and its conversation."""
    where, messages = json.loads(piece.text)
    return where, messages


def _no_messages(where: str, field: str, names: Sequence[str]) -> DataError:
    found = ", ".join(map(str, names[:20])) or "nothing"
    return DataError(
        f"{where} has no {field!r}, found {found}: name the list of messages with `messages_field`, or a prompt and its response with "
        "`source_field` and `target_field`"
    )
