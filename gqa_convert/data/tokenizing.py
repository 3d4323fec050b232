"""Tokenises running text."""

import copy
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gqa_convert.data.documents import Fields, Piece
from gqa_convert.data.token_files import Marked, packed
from gqa_convert.errors import DataError


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
        eos = end_of_text(tokenizer)
        self._begin = _beginning(tokenizer) if closed else []
        self._end = [eos] if closed else []
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
