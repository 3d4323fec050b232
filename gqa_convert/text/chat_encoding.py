"""Tokenises conversations with the chat template of a tokenizer."""

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gqa_convert.errors import DataError
from gqa_convert.text.chats import Message, conversation
from gqa_convert.text.documents import Piece
from gqa_convert.text.marked_tokens import marked
from gqa_convert.text.order import Integers
from gqa_convert.text.tokenizing import Tokens, tokenizer_state

LossOn = Literal["assistant", "all"]
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""The tag with which a template marks what the assistant writes."""


class ChatEncoder:
    """A tokenizer configured for conversations: their tokens are those of its chat template, without further special
    tokens, and carry the marks of `marked_tokens`.

    A template that marks the assistant's text is believed. With any other template, an assistant's turn is what the
    template adds for it to the conversation before it with the generation prompt.

    Attributes:
        dtype: of the tokens.
        key: a hash of everything that determines the tokens.

    Raises:
        DataError: the tokenizer has no chat template, or can't tell where a token begins in a text.
    """

    dtype = np.dtype(np.uint32)

    def __init__(self, tokenizer: Any, loss_on: LossOn) -> None:
        self._tokenizer, self._loss_on = tokenizer, loss_on
        template = chat_template(tokenizer)
        self._marks_assistant = _GENERATION.search(template) is not None
        if loss_on == "assistant" and not tokenizer.is_fast:
            raise DataError(
                "loss_on is assistant, which needs a tokenizer with a tokenizer.json to find the assistant's tokens: set loss_on to all"
            )
        state = [tokenizer_state(tokenizer), template, tokenizer.special_tokens_map, loss_on]
        self.key = hashlib.sha256(json.dumps(["chat", state], default=str).encode()).hexdigest()

    def encode(self, pieces: list[Piece], *, begins: bool) -> tuple[Tokens, int]:  # noqa: ARG002
        """The concatenated tokens of conversations, and their number.

        Raises:
            DataError: the template refuses a conversation, or its assistant turns can't be found.
        """
        read = [conversation(piece) for piece in pieces]
        texts = [self._rendered(messages, where) for where, messages in read]
        found = self._tokenizer(
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            return_offsets_mapping=self._loss_on == "assistant",
            verbose=False,
        )
        parts = [np.empty(0, np.uint32)]
        for number, ((where, messages), text) in enumerate(zip(read, texts, strict=True)):
            ids = np.array(found["input_ids"][number], np.int64)
            learned = np.ones(len(ids), bool)
            if self._loss_on == "assistant":
                learned = self._learned(messages, text, ids, found["offset_mapping"][number], where)
            parts.append(marked(ids, learned))
        return np.concatenate(parts), len(pieces)

    def _learned(
        self, messages: list[Message], text: str, ids: Integers, offsets: Sequence[tuple[int, int]], where: str
    ) -> npt.NDArray[np.bool_]:
        """Whether each token of a conversation is the assistant's: [tokens]."""
        if self._marks_assistant:
            both = self._tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
            return np.array(both["assistant_masks"], bool)
        learned = np.zeros(len(ids), bool)
        begins = np.array([begin for begin, _ in offsets], np.int64)
        for begin, end in self._assistant_spans(messages, text, where):
            learned |= (begins >= begin) & (begins < end)
        return learned

    def _assistant_spans(self, messages: list[Message], text: str, where: str) -> list[tuple[int, int]]:
        """The first character of each assistant turn and the end of what the template closes it with."""
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._rendered(messages[:number], where, prompt=True) if number else ""
            after = text if number == len(messages) - 1 else self._rendered(messages[: number + 1], where)
            if not (after.startswith(before) and text.startswith(after)):
                raise DataError(
                    f"{where}: the chat template renders a conversation differently once later messages follow message {number + 1}, so that the "
                    "assistant's tokens can't be found: set loss_on to all, or use a template with {% generation %}"
                )
            spans.append((len(before), len(after)))
        return spans

    def _rendered(self, messages: list[Message], where: str, *, prompt: bool = False) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        except Exception as problem:  # a template may fail in any way
            reason = str(problem).strip().splitlines()
            raise DataError(
                f"{where}: the chat template refuses the conversation ({reason[0][:200] if reason else type(problem).__name__}): correct or remove "
                "the row"
            ) from None
        return text


def chat_template(tokenizer: Any) -> str:
    """The tokenizer's default chat template.

    Raises:
        DataError: it has none.
    """
    try:
        return str(tokenizer.get_chat_template())
    except (ValueError, AttributeError):
        raise DataError(
            "the data hold conversations and the tokenizer has no chat template: name running text, or copy chat_template.jinja of the model's "
            "repository beside the tokenizer"
        ) from None
