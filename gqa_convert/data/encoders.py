"""How running text and conversations are tokenised."""

from typing import Any

from gqa_convert.data.chat import ChatEncoder
from gqa_convert.data.documents import ChatFields, LossOn
from gqa_convert.data.sources import Source, TextSource, text_fields
from gqa_convert.data.tokenizing import TextEncoder


def text_encoder(
    source: Source, text: TextSource, tokenizer: Any, *, closed: bool, chats: bool, loss_on: LossOn
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
    fields = text_fields(source, text, chats=chats)
    if isinstance(fields, ChatFields):
        return ChatEncoder(tokenizer, fields, loss_on)
    return TextEncoder(tokenizer, fields, closed=closed)
