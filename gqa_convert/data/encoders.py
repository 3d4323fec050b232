"""Chooses how the documents of a source are tokenised."""

from typing import Any

from gqa_convert.data.chat import ChatEncoder
from gqa_convert.data.documents import PAIR_KEYS, ChatFields, LossOn, PairFields
from gqa_convert.data.files import Files
from gqa_convert.data.hub import HubDataset
from gqa_convert.data.objectives import Objective
from gqa_convert.data.pairs import PairEncoder
from gqa_convert.data.sources import Source, text_fields
from gqa_convert.data.token_files import Encoder
from gqa_convert.data.tokenizing import TextEncoder
from gqa_convert.errors import DataError


def encoder_for(objective: Objective, source: Source, text: Files | HubDataset, tokenizer: Any) -> Encoder:
    """The encoder of a source for training.

    Raises:
        DataError: the source does not suit the objective, or the tokenizer not the source.
    """
    if not objective.reads_pairs:
        decoder = not objective.encoder_decoder
        return text_encoder(source, text, tokenizer, closed=decoder, chats=decoder, loss_on=source.loss_on)
    if source.source_field is None or source.target_field is None:
        raise DataError(f"the objective is pairs, and {text.label} does not name their fields: add {PAIR_KEYS}")
    return PairEncoder(tokenizer, PairFields(source.source_field, source.target_field))


def text_encoder(
    source: Source, text: Files | HubDataset, tokenizer: Any, *, closed: bool, chats: bool, loss_on: LossOn
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
