"""Reads the text to score once, so that all models get the same text."""

from typing import Any

from gqa_convert.data.documents import PAIR_KEYS, Fields, Piece
from gqa_convert.data.files import Files
from gqa_convert.data.sources import Source, open_source
from gqa_convert.errors import DataError
from gqa_convert.measuring import StageProgress, no_progress
from gqa_convert.measuring.evaluation.examples import encode

STREAM_TOKENS = 1_000_000
"""The default number of tokens read from a Hub dataset, because some datasets never end."""


def read_pieces(
    source: Source, tokenizer: Any, tokens: int | None, progress: StageProgress = no_progress
) -> list[Piece]:
    """The text of a source, or the part from its beginning that has so many tokens.

    Args:
        source: a file, a folder, a pattern, a Hub dataset or `python-stdlib`.
        tokenizer: the tokenizer that counts the tokens.
        tokens: the most tokens to read; by default all of a file, and 1M of a Hub dataset.
        progress: called with the bytes or tokens read and their total.

    Raises:
        DataError: the text can't be found or read, or is empty.
    """
    text = open_source(source)
    found: list[Piece] = []
    limit = tokens or STREAM_TOKENS
    left = limit
    for piece in text.pieces(Fields((source.text_field,))):
        found.append(piece)
        if isinstance(text, Files) and tokens is None:
            progress(text.bytes_read, text.total_bytes)
            continue
        _, sizes = encode(tokenizer, piece.text)
        progress(min(limit, limit - left + len(sizes)), limit)
        if len(sizes) >= left:
            found[-1] = Piece(piece.text.encode()[: sizes[:left].sum()].decode())
            break
        left -= len(sizes)
    if not found:
        raise DataError(f"{text.label} holds no text: name another source or --text-field")
    return found


def read_pairs(
    source: Source, fields: tuple[str, str], count: int | None, progress: StageProgress = no_progress
) -> list[tuple[str, str]]:
    """Pairs of texts: two fields of each row of JSON lines, Parquet files or a Hub dataset.

    Args:
        source: the source of the rows.
        fields: the field of the source texts and the field of the targets.
        count: the most pairs to read.
        progress: called with the bytes or pairs read and their total.

    Raises:
        DataError: the rows can't be found or read, lack a field, or have no text in it.
    """
    text = open_source(source)
    pairs: list[tuple[str, str]] = []
    try:
        for piece in text.pieces(Fields(fields, "pair")):
            for field, side in zip(fields, piece.text, strict=True):
                if not side:
                    raise DataError(
                        f"{piece.where}: {field!r} is empty, expected text: remove the row, or name another field"
                    )
            pairs.append(piece.text)
            if isinstance(text, Files):
                progress(text.bytes_read, text.total_bytes)
            elif count:
                progress(len(pairs), count)
            if len(pairs) == count:
                break
    except DataError as problem:  # in the words of a recipe
        raise DataError(str(problem).replace(PAIR_KEYS, "--source-field and --target-field")) from problem.__cause__
    if not pairs:
        raise DataError(f"{text.label} holds no rows: name another source")
    return pairs
