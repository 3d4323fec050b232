"""Prompts that text is generated from: lines of a text file, or conversations without their last answers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint.paths import local_path
from gqa_convert.errors import DataError
from gqa_convert.text.chats import ChatColumns, Message, conversation
from gqa_convert.text.documents import TextColumn
from gqa_convert.text.text_files import FileText


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a generated text continues.

    Attributes:
        text: what the model reads, with the template's special tokens for a conversation.
        messages: the conversation; None for running text.
    """

    text: str
    messages: tuple[Message, ...] | None = None

    def row(self, continuation: str) -> dict[str, Any]:
        """The row of a result, in a form that a recipe's `data` reads."""
        if self.messages is None:
            return {"text": self.text + continuation}
        return {"messages": [*self.messages, {"role": "assistant", "content": continuation.strip()}]}


def read_prompts(path: str | Path, tokenizer: Any) -> list[Prompt]:
    """The prompts of a file: each line of a text file, or each row of JSON lines or Parquet with `messages`, `prompt` or
    `text`. With a chat template, each becomes a conversation that ends with the generation prompt.

    Raises:
        DataError: the file can't be read or holds no prompt, or the template refuses one.
    """
    place = local_path(str(path))
    if not place.is_file():
        raise DataError(
            f"the prompts {path} are not a file: name a text file with one prompt per line, JSON lines or Parquet"
        )
    text = FileText(str(path), [place], "text")
    names = text.first_fields()
    templated = bool(getattr(tokenizer, "chat_template", None))
    if "messages" in names:
        text.columns = ChatColumns()
        if not templated:
            raise DataError(f"{path} holds conversations and the tokenizer has no chat template: name plain prompts")
        chats = (conversation(piece) for piece in text)
        found = [_of_chat(messages, tokenizer, where) for where, messages in chats if messages]
    else:
        if names:
            text.columns = TextColumn("prompt" if "prompt" in names else "text")
            lines = [piece.text for piece in text]
        else:
            lines = "".join(piece.text for piece in text).splitlines()
        plain = [line for line in lines if line.strip()]
        found = [
            _of_chat([{"role": "user", "content": line}], tokenizer, str(path)) if templated else Prompt(line)
            for line in plain
        ]
    if not found:
        raise DataError(f"{path} holds no prompt: write one per line")
    return found


def _of_chat(messages: list[Message], tokenizer: Any, where: str) -> Prompt:
    """A conversation up to the last message that is not the assistant's."""
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise DataError(f"{where}: the conversation has messages of the assistant alone: remove the row")
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as problem:  # a template may fail in any way
        reason = str(problem).strip().splitlines()
        raise DataError(
            f"{where}: the chat template refuses the prompt ({reason[0][:200] if reason else 'no reason'})"
        ) from None
    return Prompt(text, tuple(messages))
