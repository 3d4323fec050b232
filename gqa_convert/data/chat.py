"""Tokenises conversations with the chat template of a tokenizer."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gqa_convert.data.documents import Fields, LossOn, Message, Piece
from gqa_convert.data.token_files import UNLEARNED, Marked, packed
from gqa_convert.data.tokenizing import tokenizer_state
from gqa_convert.errors import DataError

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""The tag with which a template marks what the assistant writes."""


class ChatEncoder:
    """Encodes conversations: their tokens are those of the tokenizer's chat template, without further special tokens.

    A template that marks the assistant's text is believed. With any other template, an assistant's turn is what the
    template adds for it to the conversation before it with the generation prompt.

    Attributes:
        fields: the fields that hold the conversation.
        key: everything that determines the tokens, as plain data.

    Raises:
        DataError: the tokenizer has no chat template, or can't tell where a token begins in a text.
    """

    def __init__(self, tokenizer: Any, fields: Fields, loss_on: LossOn) -> None:
        self._tokenizer, self.fields, self._loss_on = tokenizer, fields, loss_on
        template = chat_template(tokenizer)
        self._marks_assistant = _GENERATION.search(template) is not None
        if loss_on == "assistant" and not tokenizer.is_fast:
            raise DataError(
                "loss_on is assistant, which needs a tokenizer with a tokenizer.json to find the assistant's tokens: set loss_on to all"
            )
        self.key = [tokenizer_state(tokenizer), template, tokenizer.special_tokens_map, loss_on]

    def encode(self, pieces: Sequence[Piece]) -> Marked:
        """The tokens of conversations, one behind the other: [tokens].

        Raises:
            DataError: the template refuses a conversation, or its assistant turns can't be found.
        """
        texts = [self._rendered(piece.text, piece.where) for piece in pieces]
        found = self._tokenizer(
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            return_offsets_mapping=self._loss_on == "assistant",
            verbose=False,
        )
        tokens = packed(found["input_ids"], [True] * len(pieces))
        if self._loss_on == "assistant":
            each = zip(pieces, texts, found["offset_mapping"], strict=True)
            learned = np.concatenate([self._learned(piece, text, offsets) for piece, text, offsets in each])
            tokens[~learned] |= UNLEARNED
        return tokens

    def _learned(self, piece: Piece, text: str, offsets: Sequence[tuple[int, int]]) -> npt.NDArray[np.bool_]:
        """Whether each token of a conversation is the assistant's: [tokens]."""
        if self._marks_assistant:
            both = self._tokenizer.apply_chat_template(piece.text, return_dict=True, return_assistant_tokens_mask=True)
            return np.array(both["assistant_masks"], bool)
        begins = np.array([begin for begin, _ in offsets], np.int64)
        learned = np.zeros(len(begins), bool)
        for begin, end in self._assistant_spans(piece.text, text, piece.where):
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
            reason = str(problem).strip().split("\n")[0][:200] or type(problem).__name__
            raise DataError(
                f"{where}: the chat template refuses the conversation ({reason}): correct or remove the row"
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
