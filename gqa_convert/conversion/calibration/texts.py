"""Opens texts of calibration data, and reads them as rows of tokens."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from gqa_convert.data.encoders import ids_of, text_encoder
from gqa_convert.data.files import Files, Piece
from gqa_convert.data.order import Integers
from gqa_convert.data.sources import Source, TextSource, as_source, open_source
from gqa_convert.data.token_files import batched, tokenize

from .blocks import BlockForm

OVERSAMPLING = 16
"""From a text that is larger, this many times the requested tokens are read before samples are
drawn.
"""
_CHARACTERS = 4
"""The estimated characters per token. Of a text that yields fewer tokens, a larger share is
read.
"""
_WHOLE = 1 << 22
"""Bytes up to which files are tokenised in full, regardless of the number of tokens requested."""


class OpenText(NamedTuple):
    """What is known of a text before it is read.

    Attributes:
        stated: the source as its user states it.
        text: its documents.
    """

    stated: Source
    text: TextSource

    @property
    def label(self) -> str:
        """The text as its user named it, with the commit of a dataset; or what it is."""
        if isinstance(self.text, Files):
            return self.text.label
        return f"{self.text.label}@{self.text.commit[:12]}"


def open_text(given: Any) -> OpenText:
    """A text that a user named; see `as_source`.

    Raises:
        DataError: there is no such text.
    """
    stated = as_source(given)
    return OpenText(stated, open_source(stated))


@dataclass(frozen=True, slots=True)
class TextReader:
    """Reads as much of a text as blocks are drawn from.

    Files of up to 4 MiB, or of up to 64 characters per requested token, are tokenised in full. From
    larger files, documents (or parts of long ones) are taken at even intervals up to that size,
    each as a separate document. From a Hub dataset, 16 tokens per requested token are streamed from
    its beginning and kept in the token cache.

    How much is read depends on the fitted blocks alone, so that no number of others changes these.

    Attributes:
        tokenizer: a transformers tokenizer.
        form: of the blocks.
        counts: the blocks of each stream, the fitted ones first.
    """

    tokenizer: Any
    form: BlockForm
    counts: Sequence[int]

    def read(self, opened: OpenText) -> Integers:
        """The tokens of a text, as many as the fitted blocks take at least, or all: [n].

        Raises:
            DataError: it can't be read, or the tokenizer lacks something for it.
        """
        stated, text = opened
        closed = self.form.kind != "spans"
        encoder = text_encoder(stated, text, self.tokenizer, closed=closed, chats=True)
        wanted = self.counts[0] * self.form.raw
        most = OVERSAMPLING * wanted
        if not isinstance(text, Files):
            stored = tokenize(text, encoder, needed=most)
            return stored.read(0, min(stored.size, most))

        share = min(1.0, max(_WHOLE, _CHARACTERS * most) / max(1, text.total_bytes))
        while True:
            pieces = _thinned(text.pieces(encoder.fields), share)
            parts = [ids_of(encoder.encode(batch)) for batch in batched(pieces)]
            tokens: Integers = np.concatenate([np.empty(0, np.int64), *parts])
            if share == 1 or len(tokens) >= wanted:
                return tokens
            share = min(1.0, 8 * share)  # most of the bytes belonged to other fields of the rows


def _thinned(pieces: Iterable[Piece], share: float) -> Iterator[Piece]:
    """An evenly spread share of the characters.

    Unless the share is 1, each piece is a separate document, because its neighbours may be missing.
    """
    seen = kept = 0
    for piece in pieces:
        if kept <= share * seen:
            kept += len(str(piece.text))
            yield piece if share == 1 else piece._replace(first=True, last=True)
        seen += len(str(piece.text))
