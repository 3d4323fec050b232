"""Reads the text to score once, so that all models get the same text."""

from typing import Any

from gqa_convert.data.documents import FieldError, Fields, Piece
from gqa_convert.data.encoders import ChatEncoder, holds_conversations
from gqa_convert.data.files import Files
from gqa_convert.data.sources import Source, open_source
from gqa_convert.errors import DataError
from gqa_convert.measuring import StageProgress
from gqa_convert.measuring.evaluation.examples import encode

STREAM_TOKENS = 1_000_000
"""The default number of tokens, or of pairs, read from a Hub dataset, because some datasets never end."""


def read_documents(source: Source, tokenizer: Any, limit: int | None, progress: StageProgress) -> list[Piece]:
    """The texts of a source, or pairs of texts if it states the fields of both, or conversations as the chat template
    writes them, or the first of them up to a limit.

    Args:
        source: a file, a folder, a pattern, a Hub dataset or `python-stdlib`.
        tokenizer: the tokenizer that counts tokens.
        limit: the most tokens of text, or pairs, to read; by default all of a file, and 1M of a Hub dataset.
        progress: called with what was read of the limit, or else of the bytes of the files.

    Raises:
        DataError: the text can't be found or read, or is empty; or rows lack a field, or have no text in it.
    """
    text = open_source(source)
    fields, options, chats = Fields((source.text_field,)), "--text-field", None
    if source.source_field and source.target_field:
        fields, options = (
            Fields((source.source_field, source.target_field), "pair"),
            "--source-field and --target-field",
        )
    elif holds_conversations(source, text):
        chats = ChatEncoder(tokenizer)
        fields = chats.fields
    if limit is None and not isinstance(text, Files):
        limit = STREAM_TOKENS
    found = []
    read = 0
    try:
        for given in text.pieces(fields):
            piece = chats.rendered(given) if chats else given
            found.append(piece)
            if fields.holds == "pair":
                for field, side in zip(fields.names, piece.text, strict=True):
                    if not side:
                        raise DataError(
                            f"{piece.where}: {field!r} is empty, expected text: remove the row, or name another field"
                        )
                read += 1
            elif limit is not None:
                sizes = encode(tokenizer, piece.text, split_special_tokens=not piece.is_rendered)[1][: limit - read]
                read += len(sizes)
                if read == limit:
                    found[-1] = piece._replace(text=piece.text.encode()[: sizes.sum()].decode(), last=True)
            if limit is not None:
                progress(read, limit)
            elif isinstance(text, Files):
                progress(text.bytes_read, text.total_bytes)
            if read == limit:
                break
    except FieldError as problem:
        raise DataError(f"{problem}, or name another with {options}") from None
    if not found:
        raise DataError(f"{text.label} holds no text: name another source or --text-field")
    return found
