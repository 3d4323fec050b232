"""Tokenises documents in batches, so that the tokenizer's threads work in parallel."""

import copy
import hashlib
import json
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gqa_convert.errors import DataError
from gqa_convert.text.documents import Piece

Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
_BATCH_CHARACTERS = 1 << 22
_BATCH_PIECES = 1024


class Encoder(Protocol):
    """Turns documents into tokens.

    Attributes:
        dtype: of the tokens.
        key: a hash of everything that determines the tokens.
    """

    dtype: np.dtype[Any]
    key: str

    def encode(self, pieces: list[Piece], *, begins: bool) -> tuple[Tokens, int]:
        """The concatenated tokens of the pieces, and the number of documents that end in them."""


class TextEncoder:
    """A tokenizer configured for token files.

    A document begins with the beginning-of-text token, if the tokenizer adds one, and ends with end-of-text. Without
    `closed` it has neither, as in T5's training text.

    Attributes:
        dtype: the narrowest unsigned integers that hold the vocabulary.
        key: a hash of everything that determines the tokens.
    """

    def __init__(self, tokenizer: Any, *, closed: bool) -> None:
        self._tokenizer = tokenizer
        self._backend = _backend(tokenizer)
        self.eos = end_of_text(tokenizer)
        self.begin = _beginning(tokenizer) if closed else []
        self.end = [self.eos] if closed else []
        size = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=0))
        self.dtype = np.dtype(np.uint16 if size <= 1 << 16 else np.uint32)
        self.key = hashlib.sha256(
            json.dumps([tokenizer_state(tokenizer), self.begin, self.end, self.dtype.name]).encode()
        ).hexdigest()

    def encode(self, pieces: list[Piece], *, begins: bool) -> tuple[Tokens, int]:
        """The concatenated tokens of the pieces.

        Args:
            pieces: parts of documents, in order.
            begins: whether the first piece begins a document.

        Returns:
            [tokens], and the number of documents that end in them.
        """
        parts: list[list[int]] = []
        for piece, ids in zip(pieces, self._ids([piece.text for piece in pieces]), strict=True):
            parts.append([*(self.begin if begins else []), *ids, *(self.end if piece.last else [])])
            begins = piece.last
        flat = np.fromiter(chain.from_iterable(parts), self.dtype, sum(map(len, parts)))
        return flat, sum(piece.last for piece in pieces)

    def _ids(self, texts: list[str]) -> list[list[int]]:
        try:
            return self._encoded(texts)
        except (UnicodeEncodeError, TypeError):  # a lone surrogate, which JSON can represent and UTF-8 can't
            return self._encoded([text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in texts])

    def _encoded(self, texts: list[str]) -> list[list[int]]:
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


def batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Group pieces into batches, large enough for several threads and small enough for memory."""
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_PIECES:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


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


def _beginning(tokenizer: Any) -> list[int]:
    """The beginning-of-text token, if the tokenizer adds it to every text."""
    bos = tokenizer.bos_token_id
    ids = tokenizer("a", return_attention_mask=False)["input_ids"]
    return [int(bos)] if bos is not None and bos != tokenizer.eos_token_id and ids[:1] == [bos] else []


def tokenizer_state(tokenizer: Any) -> list[Any]:
    """Everything that the tokens of a text depend on, as plain data."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        state = json.loads(backend.to_str())
        state.pop("truncation", None)  # padding and truncation depend on earlier use of the tokenizer
        state.pop("padding", None)
        return [type(tokenizer).__name__, state]
    given = {
        name: value for name, value in sorted(getattr(tokenizer, "init_kwargs", {}).items()) if name != "name_or_path"
    }
    settings = {name: _content(value) or repr(value) for name, value in given.items()}
    files = [
        getattr(tokenizer, "vocab_file", None),
        getattr(tokenizer, "spm_file", None),
        *getattr(tokenizer, "spm_files", ()),
    ]
    return [
        type(tokenizer).__name__,
        sorted(tokenizer.get_vocab().items()),
        settings,
        [_content(file) for file in files],
    ]


def _content(file: object) -> str | None:
    """A hash of a file's content; None if the path is not a file."""
    if not isinstance(file, str) or not Path(file).is_file():
        return None
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()
