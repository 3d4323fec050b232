"""How documents become tokens: running text, conversations and pairs of texts.

A token is its id with a mark in the upper bit, for which a vocabulary has no use, where it is the
last of a document.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from gqa_convert.errors import DataError, first_line

from .files import Fields, Piece
from .model_tokenizer import beginning_of_text, end_of_text, template_of_one_day, tokenizer_state
from .order import Integers
from .sources import Source, TextSource, first_row

Marked = npt.NDArray[np.uint32]
"""Token ids, the last one of each document with its mark."""
LAST = np.uint32(1 << 31)
"""The mark of the last token of a document."""


def ids_of(marked: Marked) -> Integers:
    """The ids of tokens without their marks."""
    return (marked & ~LAST).astype(np.int64)


def packed(parts: Sequence[Sequence[int]], ends: Sequence[bool]) -> Marked:
    """Token ids one behind the other: [tokens].

    The last token of each part for which `ends` is true has the mark.
    """
    lengths = [len(part) for part in parts]
    flat = np.fromiter(chain.from_iterable(parts), np.uint32, sum(lengths))
    last = np.cumsum(lengths, dtype=np.int64)[np.array(ends, bool)] - 1
    flat[last[last >= 0]] |= LAST
    return flat


class Encoder(ABC):
    """Turns documents into tokens.

    Args:
        tokenizer: a transformers tokenizer.
        fields: the fields of a row that hold a document.
        settings: of the encoder, as plain data.

    Attributes:
        key: everything that determines the tokens of a document, as plain data.
    """

    def __init__(self, tokenizer: Any, fields: Fields, *settings: Any) -> None:
        self._tokenizer = tokenizer
        self.fields = fields
        self.key = [tokenizer_state(tokenizer), *settings]

    @abstractmethod
    def encode(self, pieces: Sequence[Piece]) -> Marked:
        """The tokens of the pieces, one behind the other: [tokens]."""

    def _ids(self, texts: Sequence[str], **options: Any) -> Any:
        """What the tokenizer makes of texts, with options of its call."""
        return self._tokenizer(texts, return_attention_mask=False, verbose=False, **options)


class TextEncoder(Encoder):
    """Encodes running text. The name of a special token in a text is text.

    A document begins with the beginning-of-text token, if the tokenizer adds one, and ends with
    end-of-text. Without `closed` it has neither, as in T5's training text.

    Raises:
        DataError: the tokenizer has no end-of-text token.
    """

    def __init__(self, tokenizer: Any, fields: Fields, *, closed: bool) -> None:
        end, begin = [end_of_text(tokenizer)], beginning_of_text(tokenizer)
        self._end = end if closed else []
        self._begin = begin if closed and begin != end else []
        super().__init__(tokenizer, fields, self._begin, self._end)

    def encode(self, pieces: Sequence[Piece]) -> Marked:
        """See `Encoder.encode`."""
        texts = [piece.text for piece in pieces]
        parts = self._ids(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        for piece, ids in zip(pieces, parts, strict=True):
            if piece.first:
                ids[:0] = self._begin
            if piece.last:
                ids += self._end
        return packed(parts, [piece.last for piece in pieces])


class ChatEncoder(Encoder):
    """Encodes conversations as the tokenizer's chat template writes them, without further special
    tokens.

    Raises:
        DataError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any) -> None:
        try:
            self._template = template_of_one_day(tokenizer)
        except (ValueError, AttributeError):
            raise DataError(
                "the data hold conversations and the tokenizer has no chat template: name running "
                "text, or copy chat_template.jinja of the model's repository beside the tokenizer"
            ) from None
        fields = Fields(("messages",), "messages")
        super().__init__(tokenizer, fields, self._template, tokenizer.special_tokens_map)

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
                f"{piece.where}: the chat template refuses the conversation "
                f"({first_line(problem)}): correct or remove the row"
            ) from None
        return piece._replace(text=text, is_rendered=True)

    def encode(self, pieces: Sequence[Piece]) -> Marked:
        """See `Encoder.encode`.

        Raises:
            DataError: the template refuses a conversation.
        """
        texts = [self.rendered(piece).text for piece in pieces]
        parts = self._ids(texts, add_special_tokens=False)["input_ids"]
        return packed(parts, [True] * len(parts))


class PairEncoder(Encoder):
    """Encodes pairs, each as two documents with the tokenizer's special tokens.

    A target ends with end-of-text even if the tokenizer does not add it, because a decoder must
    learn to stop. Pairs without text on either side are left out.
    """

    def __init__(self, tokenizer: Any, fields: Fields) -> None:
        eos = tokenizer.eos_token_id
        self._end = [] if eos is None else [eos]
        super().__init__(tokenizer, fields, "pairs", self._end)

    def encode(self, pieces: Sequence[Piece]) -> Marked:
        """The tokens of source, target, source, target and so on: [tokens]."""
        pairs = [piece.text for piece in pieces if all(piece.text)]
        parts = []
        if pairs:
            sources, targets = map(list, zip(*pairs, strict=True))
            found = self._ids(sources, text_target=targets, split_special_tokens=True)
            for source, target in zip(found["input_ids"], found["labels"], strict=True):
                closed = target if target[-1:] == self._end else target + self._end
                if source and closed:
                    parts += [source, closed]
        return packed(parts, [True] * len(parts))


def holds_conversations(source: Source, text: TextSource) -> bool:
    """Whether a source, opened as `text`, holds conversations, as stated or by its first row."""
    if source.format != "auto":
        return source.format == "chat"
    row = first_row(text)
    return "messages" in row and source.text_field not in row


def text_encoder(
    source: Source, text: TextSource, tokenizer: Any, *, closed: bool, chats: bool
) -> Encoder:
    """The encoder of running text or conversations.

    Args:
        source: as the user states it.
        text: what it names.
        tokenizer: a transformers tokenizer.
        closed: whether running text begins and ends with special tokens.
        chats: whether conversations can be read.

    Raises:
        DataError: the source is stated to hold conversations, which can't be read, or the tokenizer
            lacks something.
    """
    if chats and holds_conversations(source, text):
        return ChatEncoder(tokenizer)
    if source.format == "chat":
        raise DataError(
            f"{source.source} holds conversations, which only decoders are trained and calibrated "
            "on: name running text"
        )
    return TextEncoder(tokenizer, Fields((source.text_field,)), closed=closed)
