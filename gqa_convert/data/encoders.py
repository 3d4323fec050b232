"""How running text and conversations are tokenised."""

from typing import Any

from gqa_convert.data.chat import ChatEncoder
from gqa_convert.data.documents import Fields, LossOn
from gqa_convert.data.files import Files
from gqa_convert.data.sources import Source, TextSource
from gqa_convert.data.tokenizing import TextEncoder
from gqa_convert.errors import DataError


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
    fields = _fields(source, text)
    if fields.is_chat and chats:
        return ChatEncoder(tokenizer, fields, loss_on)
    if source.format == "chat":
        raise DataError(
            f"{source.source} holds conversations, which only decoders are trained and calibrated on: name running text"
        )
    return TextEncoder(tokenizer, Fields((source.text_field,)), closed=closed)


def _fields(source: Source, text: TextSource) -> Fields:
    """The fields that a source states or the first row of its files suggests."""
    if source.format == "chat" and source.source_field is not None and source.target_field is not None:
        return Fields((source.source_field, source.target_field), "prompt")
    is_chat = source.format == "chat"
    if source.format == "auto" and isinstance(text, Files):
        row = text.first_row()
        is_chat = source.messages_field in row and source.text_field not in row
    return Fields((source.messages_field,), "messages") if is_chat else Fields((source.text_field,))
