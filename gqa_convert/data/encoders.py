"""How running text and conversations are tokenised, these with the chat template of a tokenizer."""

import json
from collections.abc import Sequence
from contextlib import suppress
from datetime import date
from typing import Any

from gqa_convert.data.documents import Fields, Piece
from gqa_convert.data.sources import Source, TextSource
from gqa_convert.data.token_files import Marked, packed
from gqa_convert.errors import DataError, first_line

DATE = date(2024, 7, 26)
"""Today, for chat templates that write it, so that the same conversation has the same tokens every day."""
_PARTS_OF_DATES = "%a %A %b %B %d %-d %e %j %m %-m %y %Y %H %I %M %S %p"


class TextEncoder:
    """Encodes running text with a tokenizer. The name of a special token in a text is text.

    A document begins with the beginning-of-text token, if the tokenizer adds one, and ends with end-of-text. Without
    `closed` it has neither, as in T5's training text.

    Attributes:
        fields: the field that holds the text.
        key: everything that determines the tokens of a text, as plain data.

    Raises:
        DataError: the tokenizer has no end-of-text token.
    """

    def __init__(self, tokenizer: Any, fields: Fields, *, closed: bool) -> None:
        self._tokenizer = tokenizer
        self.fields = fields
        end = [end_of_text(tokenizer)]
        begin = beginning_of_text(tokenizer)
        self._end = end if closed else []
        self._begin = begin if closed and begin != end else []
        self.key = [tokenizer_state(tokenizer), self._begin, self._end]

    def encode(self, pieces: Sequence[Piece]) -> Marked:
        """The tokens of the pieces, one behind the other: [tokens]."""
        texts = [piece.text for piece in pieces]
        parts = self._tokenizer(
            texts,
            add_special_tokens=False,
            split_special_tokens=True,
            return_attention_mask=False,
            verbose=False,
        )["input_ids"]
        for piece, ids in zip(pieces, parts, strict=True):
            if piece.first:
                ids[:0] = self._begin
            if piece.last:
                ids += self._end
        return packed(parts, [piece.last for piece in pieces])


def beginning_of_text(tokenizer: Any) -> list[int]:
    """The token with which the tokenizer begins every text; none if it adds no such token."""
    begin = [tokenizer.bos_token_id]
    return begin if tokenizer("a")["input_ids"][:1] == begin else []


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
    """Everything that the tokens of a text depend on, as plain data: the content of tokenizer.json, or of a tokenizer
    without one the vocabulary and the settings.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    name = type(tokenizer).__name__
    if backend is None:
        return [
            name,
            sorted(tokenizer.get_vocab().items()),
            repr(sorted(tokenizer.init_kwargs.items())),
        ]
    state = json.loads(backend.to_str())
    state.pop("truncation", None)  # padding and truncation depend on earlier use of the tokenizer
    state.pop("padding", None)
    return [name, state]


class ChatEncoder:
    """Encodes conversations: their tokens are those of the tokenizer's chat template, without further special tokens.

    Attributes:
        fields: the field that holds the conversation.
        key: everything that determines the tokens, as plain data.

    Raises:
        DataError: the tokenizer has no chat template.
    """

    fields = Fields(("messages",), "messages")

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        try:
            self._template = template_of_one_day(tokenizer)
        except (ValueError, AttributeError):
            raise DataError(
                "the data hold conversations and the tokenizer has no chat template: name running text, or copy chat_template.jinja of the model's "
                "repository beside the tokenizer"
            ) from None
        self.key = [tokenizer_state(tokenizer), self._template, tokenizer.special_tokens_map]

    def rendered(self, piece: Piece) -> Piece:
        """A conversation as the template writes it, in which special tokens are special.

        Raises:
            DataError: the template refuses it.
        """
        try:
            text = self._tokenizer.apply_chat_template(
                piece.text, chat_template=self._template, tokenize=False
            )
        except Exception as problem:  # a template may fail in any way
            raise DataError(
                f"{piece.where}: the chat template refuses the conversation ({first_line(problem)}): correct or remove the row"
            ) from None
        return piece._replace(text=text, is_rendered=True)

    def encode(self, pieces: Sequence[Piece]) -> Marked:
        """The tokens of conversations, one behind the other: [tokens].

        Raises:
            DataError: the template refuses a conversation.
        """
        texts = [self.rendered(piece).text for piece in pieces]
        found = self._tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, verbose=False
        )
        return packed(found["input_ids"], [True] * len(pieces))


def template_of_one_day(tokenizer: Any) -> str:
    """A tokenizer's chat template, in which it is always the same day.

    Raises:
        ValueError, AttributeError: it has none.
    """
    template = str(tokenizer.get_chat_template())
    if "strftime_now" not in template:
        return template
    filters = "".join(
        f"|replace('{part}', '{DATE.strftime(part)}')" for part in _PARTS_OF_DATES.split()
    )
    # the empty expression keeps a line break that follows
    return f"{{% macro strftime_now(format) %}}{{{{ format{filters} }}}}{{% endmacro %}}{{{{ '' }}}}{template}"


def holds_conversations(source: Source, text: TextSource) -> bool:
    """Whether a source, opened as `text`, holds conversations, by what is stated or by its first row."""
    if source.format != "auto":
        return source.format == "chat"
    row = {}
    with suppress(Exception):  # what is wrong with the text is explained when it is read
        row = next(text.pieces(Fields((), "row"))).text
    return "messages" in row and source.text_field not in row


def text_encoder(
    source: Source, text: TextSource, tokenizer: Any, *, closed: bool, chats: bool
) -> TextEncoder | ChatEncoder:
    """The encoder of running text or conversations.

    Args:
        source: as the user states it.
        text: what it names.
        tokenizer: a transformers tokenizer.
        closed: whether running text begins and ends with special tokens.
        chats: whether conversations can be read.

    Raises:
        DataError: the source is stated to hold conversations, which can't be read, or the tokenizer lacks something.
    """
    if chats and holds_conversations(source, text):
        return ChatEncoder(tokenizer)
    if source.format == "chat":
        raise DataError(
            f"{source.source} holds conversations, which only decoders are trained and calibrated on: name running text"
        )
    return TextEncoder(tokenizer, Fields((source.text_field,)), closed=closed)
