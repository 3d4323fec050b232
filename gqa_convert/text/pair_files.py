"""Pairs on disk: tokenised once, mapped into memory, and accessible by number.

The header is followed by the tokens of all pairs, source and target alternately and with their special tokens, and then
by the positions at which the texts end. A Hub dataset is read completely before the first pair is used, because pairs
are few compared with running text.
"""

import hashlib
import json
from array import array
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from gqa_convert.errors import DataError
from gqa_convert.text.framing import frames_of
from gqa_convert.text.hub_rows import HubText
from gqa_convert.text.order import Integers
from gqa_convert.text.pairs import Pair, pairs_of
from gqa_convert.text.sources import Source
from gqa_convert.text.text_files import FileText
from gqa_convert.text.token_files import FORMAT, HEADER, Progress, build_once, map_tokens, read_header
from gqa_convert.text.tokenizing import tokenizer_state

_BATCH = 1024
_TOKEN, _PLACE = np.dtype("<u4"), np.dtype("<u8")


class PairEncoder:
    """Encodes pairs with a tokenizer.

    Attributes:
        key: a hash of everything that determines the tokens.
        closing: special tokens at the end of a source and of a target, which are kept if a text is truncated.

    Raises:
        DataError: the tokenizer marks the languages of texts.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._frames = frames_of(tokenizer)
        self.closing = [len(frame.after) for frame in self._frames]
        state = [tokenizer_state(tokenizer), [list(frame) for frame in self._frames]]
        self.key = hashlib.sha256(json.dumps(state).encode()).hexdigest()

    def encode(self, pairs: list[Pair]) -> list[list[int]]:
        """The tokens of source, target, source, target and so on, with the special tokens around each."""
        texts: list[list[int]] = [[]] * (2 * len(pairs))
        for side, argument in enumerate(("text", "text_target")):
            found = self._tokenizer(
                **{argument: [pair[side] for pair in pairs]},
                add_special_tokens=False,
                return_attention_mask=False,
                verbose=False,
            )
            frame = self._frames[side]
            texts[side::2] = [[*frame.before, *ids, *frame.after] for ids in found["input_ids"]]
        return texts


class PairFile:
    """Tokenised pairs, as a `TokenSource` whose unit is a pair.

    Attributes:
        label: the name of the source.
        left_out: rows with an empty text on either side.
    """

    grows = False

    def __init__(self, path: Path, header: dict[str, Any], label: str) -> None:
        self.label, self.left_out = label, int(header["left_out"])
        self.fingerprint: str = header["sha256"]
        self._closing: list[int] = header["closing"]
        self._count = int(header["pairs"])
        self._tokens = map_tokens(path, _TOKEN, header["tokens"], offset=HEADER)
        self._ends = map_tokens(path, _PLACE, 2 * self._count, offset=HEADER + _padded(header["tokens"]))

    def size(self, needed: int | None = None) -> tuple[int, bool]:  # noqa: ARG002
        """The number of pairs, all of which are available."""
        return self._count, True

    def read(self, start: int, count: int) -> npt.NDArray[Any]:
        """Tokens from a position on."""
        return self._tokens[start : start + count]

    def close(self) -> None:
        """Do nothing; no thread runs in the background."""

    def lengths(self, longest: int | None = None) -> Integers:
        """The length of each source and target in tokens, special tokens included, capped at a length: [pairs, 2]."""
        ends: Integers = np.concatenate([[0], self._ends]).astype(np.int64)
        lengths = (ends[1:] - ends[:-1]).reshape(-1, 2)
        return lengths if longest is None else np.minimum(lengths, longest)

    def pair(self, number: int, longest: int) -> list[Integers]:
        """Source and target, each truncated to `longest` tokens; the special tokens at the end are kept."""
        first = int(self._ends[2 * number - 1]) if number else 0
        middle, last = (int(end) for end in self._ends[2 * number : 2 * number + 2])
        texts = self._tokens[first:middle], self._tokens[middle:last]
        return [
            shortened(text, longest, closing).astype(np.int64)
            for text, closing in zip(texts, self._closing, strict=True)
        ]


def shortened(text: npt.NDArray[Any], longest: int, closing: int) -> npt.NDArray[Any]:
    """A text truncated to its first tokens and the special tokens at its end: [at most `longest`].

    Args:
        text: tokens.
        longest: the most tokens to keep.
        closing: how many of the last ones are special.
    """
    closing = min(closing, longest)
    return text if len(text) <= longest else np.concatenate([text[: longest - closing], text[len(text) - closing :]])


def _padded(tokens: int) -> int:
    """The bytes of so many tokens, rounded up to the alignment of the positions that follow."""
    return -(-tokens * _TOKEN.itemsize // _PLACE.itemsize) * _PLACE.itemsize


def pair_path(text: FileText | HubText, source: Source, encoder: PairEncoder, cache: Path) -> Path:
    """The path of a source's pairs."""
    identity = [FORMAT, "pairs", text.identity(), source.source_field, source.target_field, encoder.key]
    return cache / f"{hashlib.sha256(json.dumps(identity).encode()).hexdigest()}.pairs"


def open_pair_file(path: Path, label: str) -> PairFile | None:
    """The pairs in a file, or None if it is missing, truncated or of another format."""
    header = read_header(path, lambda header: _padded(header["tokens"]) + 2 * header["pairs"] * _PLACE.itemsize)
    return None if header is None else PairFile(path, header, label)


def build_pair_file(
    text: FileText | HubText, source: Source, encoder: PairEncoder, path: Path, progress: Progress
) -> None:
    """Tokenise the pairs of a source unless they are cached.

    Raises:
        DataError: the pairs can't be read, there are none, or the cache can't be written.
    """
    assert source.source_field is not None
    assert source.target_field is not None
    fields = source.source_field, source.target_field

    def write(file: BinaryIO) -> dict[str, Any]:
        digest, count, ends, rows = hashlib.sha256(), 0, array("Q"), 0
        pairs = (pair for _, pair in pairs_of(text, fields))
        while batch := list(islice(pairs, _BATCH)):
            rows += len(batch)
            whole = [pair for pair in batch if pair.source and pair.target]
            for ids in encoder.encode(whole) if whole else ():
                data = np.array(ids, _TOKEN).tobytes()
                file.write(data)
                digest.update(data)
                count += len(ids)
                ends.append(count)
            if isinstance(text, FileText):
                progress(text.label, text.bytes_read(), text.total_bytes)
        if not ends:
            raise DataError(
                f"{text.label} holds no pair with text on both sides ({rows} rows): name other fields or another source"
            )
        file.write(bytes(_padded(count) - count * _TOKEN.itemsize))
        places = np.array(ends, _PLACE).tobytes()
        file.write(places)
        digest.update(places)
        left_out = rows - len(ends) // 2
        return {
            "tokens": count,
            "pairs": len(ends) // 2,
            "left_out": left_out,
            "closing": encoder.closing,
            "sha256": digest.hexdigest(),
        }

    build_once(path, lambda: open_pair_file(path, text.label) is not None, write)
