"""Opens data sources as the tokens that samples are cut from."""

from pathlib import Path
from typing import Any, Protocol

from gqa_convert.errors import DataError
from gqa_convert.text.chat_encoding import ChatEncoder
from gqa_convert.text.chats import ChatColumns
from gqa_convert.text.documents import PAIR_KEYS
from gqa_convert.text.hub_rows import HubText
from gqa_convert.text.marked_tokens import learns_any
from gqa_convert.text.packing import check_size
from gqa_convert.text.pair_files import PairEncoder, build_pair_file, open_pair_file, pair_path
from gqa_convert.text.sources import Source, open_source
from gqa_convert.text.text_files import FileText
from gqa_convert.text.token_files import Progress, TokenSource, build_token_file, file_key, open_token_file
from gqa_convert.text.token_streams import GrowingFile
from gqa_convert.text.tokenizing import Encoder, TextEncoder


class Opener(Protocol):
    """Opens the sources of one objective."""

    def make(self, source: Source) -> TokenSource:
        """A source's tokens, which are tokenised if they are not cached."""

    def find(self, source: Source) -> TokenSource:
        """A source's tokens, which another process has tokenised or is tokenising."""


class TextOpener:
    """Opens running text as token files, and Hub datasets as streams.

    Args:
        tokenizer: a transformers tokenizer.
        folder: of the token files.
        progress: called while a file is tokenised.
        closed: end each document with end-of-text.
        shortest: the fewest tokens that a source must have.
        chats: whether sources may hold conversations.
        processes: how many processes tokenise files.
    """

    def __init__(
        self,
        tokenizer: Any,
        folder: Path,
        progress: Progress,
        *,
        closed: bool,
        shortest: int,
        chats: bool = False,
        processes: int = 1,
    ) -> None:
        self._tokenizer, self._folder, self._progress = tokenizer, folder, progress
        self._shortest, self._chats = shortest, chats
        self._encoder = TextEncoder(tokenizer, closed=closed)
        self._processes = processes

    def make(self, source: Source) -> TokenSource:
        text = open_source(source, self._folder, chats=self._chats)
        encoder = self._encoder_of(text, source)
        if isinstance(text, HubText):
            tokens: TokenSource = GrowingFile(text, encoder, self._folder, writes=True)
        else:
            path = build_token_file(text, encoder, self._folder, self._progress, processes=self._processes)
            tokens = self._opened(path, text)
            if isinstance(encoder, ChatEncoder) and not learns_any(tokens):
                raise DataError(
                    f"{text.label} has no message of the assistant, whose tokens are learned: name other conversations, or set loss_on to all"
                )
        check_size(tokens, self._shortest, text.label)
        return tokens

    def find(self, source: Source) -> TokenSource:
        text = open_source(source, self._folder, ask=False, chats=self._chats)
        encoder = self._encoder_of(text, source)
        if isinstance(text, HubText):
            tokens = GrowingFile(text, encoder, self._folder, writes=False)
            tokens.look()
            if tokens.size()[0] < self._shortest:
                raise _not_there(text.label, self._folder)
            return tokens
        return self._opened(self._folder / f"{file_key(text.identity(), encoder)}.tokens", text)

    def _encoder_of(self, text: FileText | HubText, source: Source) -> Encoder:
        chats = isinstance(text.columns, ChatColumns)
        return ChatEncoder(self._tokenizer, source.loss_on) if chats else self._encoder

    def _opened(self, path: Path, text: FileText) -> TokenSource:
        tokens = open_token_file(path)
        if tokens is None:
            raise _not_there(text.label, path.parent)
        return tokens


class PairOpener:
    """Opens pairs, which are read completely before they are used."""

    def __init__(self, tokenizer: Any, folder: Path, progress: Progress) -> None:
        self._tokenizer, self._folder, self._progress = tokenizer, folder, progress

    def make(self, source: Source) -> TokenSource:
        return self._opened(source, writes=True)

    def find(self, source: Source) -> TokenSource:
        return self._opened(source, writes=False)

    def _opened(self, source: Source, *, writes: bool) -> TokenSource:
        if source.source_field is None or source.target_field is None:
            raise DataError(f"the objective is pairs, and {source.source} does not name their fields: add {PAIR_KEYS}")
        text = open_source(source, self._folder, ask=writes)
        encoder = PairEncoder(self._tokenizer)
        path = pair_path(text, source, encoder, self._folder)
        if writes:
            build_pair_file(text, source, encoder, path, self._progress)
        pairs = open_pair_file(path, text.label)
        if pairs is None:
            raise _not_there(text.label, self._folder)
        return pairs


def _not_there(label: str, folder: Path) -> DataError:
    return DataError(f"{label} was not tokenised into {folder} by the first process of this machine: see its message")
