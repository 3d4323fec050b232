"""How running text and conversations are tokenised, these with the chat template of a tokenizer."""

import copy
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gqa_convert.data.documents import Fields, LossOn, Message, Piece
from gqa_convert.data.files import Files
from gqa_convert.data.sources import Source, TextSource
from gqa_convert.data.token_files import UNLEARNED, Marked, packed
from gqa_convert.errors import DataError

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""The tag with which a template marks what the assistant writes."""


class TextEncoder:
    """Encodes running text with a tokenizer.

    A document begins with the beginning-of-text token, if the tokenizer adds one, and ends with end-of-text. Without
    `closed` it has neither, as in T5's training text.

    Attributes:
        fields: the field that holds the text.
        key: everything that determines the tokens of a text, as plain data.

    Raises:
        DataError: the tokenizer has no end-of-text token.
    """

    def __init__(self, tokenizer: Any, fields: Fields, *, closed: bool) -> None:
        self._tokenizer, self.fields = tokenizer, fields
        self._backend = _backend(tokenizer)
        eos, bos = end_of_text(tokenizer), tokenizer.bos_token_id
        self._begin: list[int] = []
        self._end = [eos] if closed else []
        if closed and bos not in (None, eos):
            # where the tokenizer begins every text with it
            self._begin = [bos] if tokenizer("a", return_attention_mask=False)["input_ids"][:1] == [bos] else []
        self.key = [tokenizer_state(tokenizer), self._begin, self._end]

    def encode(self, pieces: Sequence[Piece]) -> Marked:
        """The tokens of the pieces, one behind the other: [tokens]."""
        parts = []
        for piece, ids in zip(pieces, self._ids([piece.text for piece in pieces]), strict=True):
            begin = self._begin if piece.first else []
            end = self._end if piece.last else []
            parts.append([*begin, *ids, *end])
        return packed(parts, [piece.last for piece in pieces])

    def _ids(self, texts: list[str]) -> list[list[int]]:
        if self._backend is not None:
            return [found.ids for found in self._backend.encode_batch_fast(texts, add_special_tokens=False)]
        found = self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        return found["input_ids"]  # type: ignore[no-any-return]


def _backend(tokenizer: Any) -> Any:
    """A copy of the tokenizer of the library `tokenizers` that transformers would call, to call it without the offsets
    and masks that are not read, which takes a third less time; None for tokenizers with Python code of their own.
    """
    from transformers import PreTrainedTokenizerFast

    methods = ("__call__", "_encode_plus", "_batch_encode_plus")
    plain = all(
        getattr(type(tokenizer), name, None) is getattr(PreTrainedTokenizerFast, name, None) for name in methods
    )
    if not plain or getattr(tokenizer, "split_special_tokens", False):
        return None
    copied = copy.deepcopy(tokenizer.backend_tokenizer)
    copied.no_truncation()
    copied.no_padding()
    return copied


def end_of_text(tokenizer: Any) -> int:
    """The token that closes a document.

    Raises:
        DataError: the tokenizer has no such token.
    """
    if tokenizer.eos_token_id is None:
        raise DataError(
            "the tokenizer has no end-of-text token, which closes each document: set `eos_token` in tokenizer_config.json"
        )
    return int(tokenizer.eos_token_id)


def tokenizer_state(tokenizer: Any) -> list[Any]:
    """Everything that the tokens of a text depend on, as plain data."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        state = json.loads(backend.to_str())
        state.pop("truncation", None)  # padding and truncation depend on earlier use of the tokenizer
        state.pop("padding", None)
        return [type(tokenizer).__name__, state]
    settings = {name: value for name, value in tokenizer.init_kwargs.items() if name != "name_or_path"}
    files = [getattr(tokenizer, name, None) for name in ("vocab_file", "spm_file")]
    files += getattr(tokenizer, "spm_files", ())  # Marian's, which its settings do not name
    return [
        type(tokenizer).__name__,
        sorted(tokenizer.get_vocab().items()),
        {name: _content(value) or repr(value) for name, value in sorted(settings.items())},
        [_content(file) for file in files],
    ]


def _content(file: object) -> str | None:
    """A hash of a file's content; None if the path is not a file."""
    if not isinstance(file, str) or not Path(file).is_file():
        return None
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


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
        try:
            template = str(tokenizer.get_chat_template())
        except (ValueError, AttributeError):
            raise DataError(
                "the data hold conversations and the tokenizer has no chat template: name running text, or copy chat_template.jinja of the model's "
                "repository beside the tokenizer"
            ) from None
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
        learned, messages, where = np.zeros(len(begins), bool), piece.text, piece.where
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            # a turn ends with what the template closes it with
            before = self._rendered(messages[:number], where, prompt=True) if number else ""
            after = text if number == len(messages) - 1 else self._rendered(messages[: number + 1], where)
            if not (after.startswith(before) and text.startswith(after)):
                raise DataError(
                    f"{where}: the chat template renders a conversation differently once later messages follow message {number + 1}, so that the "
                    "assistant's tokens can't be found: set loss_on to all, or use a template with {% generation %}"
                )
            learned |= (begins >= len(before)) & (begins < len(after))
        return learned

    def _rendered(self, messages: list[Message], where: str, *, prompt: bool = False) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        except Exception as problem:  # a template may fail in any way
            reason = str(problem).strip().split("\n")[0][:200] or type(problem).__name__
            raise DataError(
                f"{where}: the chat template refuses the conversation ({reason}): correct or remove the row"
            ) from None
        return text


def text_encoder(
    source: Source, text: TextSource, tokenizer: Any, *, closed: bool, chats: bool, loss_on: LossOn = "all"
) -> TextEncoder | ChatEncoder:
    """The encoder of running text or conversations.

    Args:
        source: as the user states it.
        text: what it names.
        tokenizer: a transformers tokenizer.
        closed: whether running text begins and ends with special tokens.
        chats: whether conversations can be read.
        loss_on: which tokens of a conversation are learned.

    Raises:
        DataError: the source holds conversations, which can't be read, or the tokenizer lacks something.
    """
    is_chat = source.format == "chat"
    if source.format == "auto" and isinstance(text, Files):
        row = text.first_row()
        is_chat = source.messages_field in row and source.text_field not in row
    if is_chat and chats:
        fields = Fields((source.messages_field,), "messages")
        if source.format == "chat" and source.source_field is not None and source.target_field is not None:
            fields = Fields((source.source_field, source.target_field), "prompt")
        return ChatEncoder(tokenizer, fields, loss_on)
    if source.format == "chat":
        raise DataError(
            f"{source.source} holds conversations, which only decoders are trained and calibrated on: name running text"
        )
    return TextEncoder(tokenizer, Fields((source.text_field,)), closed=closed)
