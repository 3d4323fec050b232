"""Calibration text as a model's input: batches of blocks drawn from all parts of the text.

The blocks are what uptraining would train on: documents one after the other, each closed by end-of-text, and for
encoder-decoders with sentinels T5's span corruption. Other encoder-decoders read a block and write the same one, as in
denoising without noise.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gqa_convert.errors import ConfigError, DataError, OptionError
from gqa_convert.families.config_sizes import HIDDEN_SIZE_KEYS, VOCABULARY_KEYS
from gqa_convert.families.context_length import (
    LONGEST,
    SPAN_LENGTH,
    block_length,
    is_t5_like,
    stated_count,
    stated_positions,
)
from gqa_convert.families.loading import TASKS, auto_class, is_encoder_decoder, load_tokenizer, read_config
from gqa_convert.text.decoder_start import decoder_start
from gqa_convert.text.documents import Piece
from gqa_convert.text.hub_rows import HubText
from gqa_convert.text.objectives import SPAN_CORRUPTION
from gqa_convert.text.order import Integers, mix, permuted
from gqa_convert.text.samples import make_sampler
from gqa_convert.text.sources import as_source, open_source
from gqa_convert.text.spans import T5, SpanCut, has_sentinels, shape_for
from gqa_convert.text.text_files import FileText
from gqa_convert.text.token_files import default_cache
from gqa_convert.text.token_streams import GrowingFile
from gqa_convert.text.tokenizing import TextEncoder, batches

if TYPE_CHECKING:
    from torch import Tensor

_PER_HIDDEN = 50
_PER_SMALL_HIDDEN = 500
_SMALL_TOKENS = 102_400
"""Up to this many, small models get more tokens per hidden dimension."""

_OVERSAMPLING = 16
"""How many times the tokens asked for are made of a text that is larger still."""

_CHARACTERS = 4
"""Of a token, about; a text that turns out to have fewer tokens is read again."""

_WHOLE = 1 << 22
"""Bytes of files that are tokenised whatever number of tokens is asked for."""


@dataclass(frozen=True)
class Calibration:
    """Batches of calibration text.

    Attributes:
        batches: keyword arguments of the model's forward pass, int64 tensors on the CPU. `input_ids` [b, L] for causal
            models; for encoder-decoders also `decoder_input_ids` and `labels` [b, Ld], the labels being what the decoder is to
            predict at each place (not shifted). The blocks of a batch are equally long, and none is padded, so no mask
            is needed; a short text ends in a shorter block, which forms a separate batch.
        tokens: tokens of text in all blocks together.
        sequence_length: tokens of a block on the side that reads it; the longest one's.
        digest: SHA-256 over the token ids and what they were made with; with the same one, the batches are the same.
        description: for reports: what was read.
        warning: a message for the user, or None.
        held_out: batches like `batches`, of other blocks of the text, to judge by; none where the text has no more.
    """

    batches: "list[dict[str, Tensor]]"
    tokens: int
    sequence_length: int
    digest: str
    description: str
    warning: str | None = None
    held_out: "list[dict[str, Tensor]]" = field(default_factory=list)


def calibration_tokens_for(config: Any) -> int:
    """The default number of tokens: max(50 d, min(500 d, 102400)) for a hidden_size d, rounded up to whole blocks.

    That is 50 tokens per hidden dimension, and up to 500 below a hidden_size of 2048, where more text still helps and
    costs little. T5 and its relatives get twice as many, because their decoders see a fifth of the text.

    Args:
        config: what config.json holds, or a transformers config.

    Raises:
        ConfigError: it states no hidden_size.
    """
    values = config if isinstance(config, Mapping) else config.to_dict()
    hidden_size = stated_count(values, HIDDEN_SIZE_KEYS)
    if hidden_size is None:
        raise ConfigError(
            f"config.json states no hidden_size (none of {', '.join(HIDDEN_SIZE_KEYS)}): state how many calibration tokens to use"
        )
    tokens = max(_PER_HIDDEN * hidden_size, min(_PER_SMALL_HIDDEN * hidden_size, _SMALL_TOKENS))
    block = block_length(values)
    if is_t5_like(values):
        shape = shape_for(T5[0], SPAN_LENGTH)
        assert shape is not None
        tokens, block = 2 * tokens, shape.raw
    return -(-tokens // block) * block


def calibration_batches(
    model_folder: Path,
    source: Any,
    tokens: int,
    *,
    seed: int,
    sequence_length: int | None = None,
    batch_tokens: int = 4096,
    held_out_tokens: int = 0,
) -> Calibration:
    """Blocks of text for a model, drawn without replacement from all over the text; a text that has no more is used
    whole.

    Files of up to 4 MiB, or of 64 characters per token asked for, are tokenised whole. Of larger ones, documents (or
    parts of long ones) spread evenly over the text are taken up to that size, each as a document of its own. Of a
    dataset on the Hub the first 16 tokens per token asked for are streamed, and kept in the token cache.

    Args:
        model_folder: a local checkpoint with its tokenizer; its weights are not looked at.
        source: a file, a folder, a pattern, the id of a Hub dataset or `python-stdlib`; or, as in a recipe's `data`, a
            mapping with further keys such as `text_field` and `split`. Its weight has no meaning here.
        tokens: of text; rounded up to whole blocks.
        seed: of the choice of blocks, of their order and of the corruption.
        sequence_length: tokens of a block (of the encoder's input for span corruption); by default the model's context
            up to 2048,
            and 512 for span corruption.
        batch_tokens: tokens of a batch, at most, unless a block has more.
        held_out_tokens: of other blocks, to judge by; rounded up to whole blocks. They do not change which the others
            are.

    Raises:
        OptionError: a number makes no sense, or the model's encoder reads no text.
        DataError: the text or the tokenizer can't be read, or does not suit the model; or there are fewer than 2
            tokens.
    """
    config = read_config(model_folder)
    if tokens < 1:
        raise OptionError(f"calibration on {tokens} tokens was asked for, expected a number above 0")
    if batch_tokens < 1:
        raise OptionError(f"batches of {batch_tokens} calibration tokens were asked for, expected a number above 0")
    if is_encoder_decoder(config) and auto_class(config) == TASKS[2]:
        raise OptionError(
            f"calibration needs text that the encoder reads, and that of {config.get('model_type')} reads sound: "
            "use a method without calibration"
        )
    tokenizer = usable_tokenizer(model_folder)
    blocks = _Blocks(model_folder, config, tokenizer, sequence_length, seed)
    wanted = -(-tokens // blocks.raw)
    encoder = TextEncoder(tokenizer, closed=blocks.kind != "spans")
    label, text = _tokens(source, encoder, wanted * blocks.raw)
    if len(text) < 2:
        raise DataError(f"{label} holds {len(text)} tokens, calibration needs at least 2: name more text")
    cuts = _cuts(len(text), blocks.raw, wanted, seed)
    held_out = _cuts(len(text), blocks.raw, -(-held_out_tokens // blocks.raw), seed, after=wanted)
    rows = max(1, batch_tokens // blocks.length)
    made, other = (
        [blocks.batch(text, starts, length) for starts, length in _batched(each, rows)] for each in (cuts, held_out)
    )
    _check_vocabulary(config, made, model_folder)
    used, length = sum(count for _, count in made), max(batch["input_ids"].shape[1] for batch, _ in made)
    number = sum(len(batch["input_ids"]) for batch, _ in made)
    description = (
        f"{used} tokens of {label}: {number} block{'s' if number != 1 else ''} of {'up to ' if len({*cuts.values()}) > 1 else ''}{length} "
        f"{blocks.WORDS[blocks.kind]}, seed {seed}"
    )
    warning = None
    if used < tokens:
        warning = f"{label} gave {used} calibration tokens and {tokens} were asked for: all of it is used, more text may give a better merge"
    digest = _digest([blocks.kind, blocks.length, seed, batch_tokens, tokens], [batch for batch, _ in made])
    batches, judges = ([_tensors(batch) for batch, _ in each] for each in (made, other))
    return Calibration(batches, used, length, digest, description, warning, judges)


class _Blocks:
    """What a model's blocks are, and how batches of them are made.

    Attributes:
        kind: causal, shifted (the decoder gets what the encoder gets) or spans (T5's span corruption).
        length: tokens of a block, on the side that reads it.
        raw: tokens of text in it.
    """

    WORDS = {"causal": "tokens", "shifted": "tokens for encoder and decoder", "spans": "tokens after span corruption"}  # noqa: RUF012

    def __init__(self, folder: Path, config: dict[str, Any], tokenizer: Any, length: int | None, seed: int) -> None:
        self._tokenizer, self._seed = tokenizer, seed
        self.kind = "causal"
        if is_encoder_decoder(config):
            self.kind = "spans" if has_sentinels(tokenizer) else "shifted"
            self._start = decoder_start(folder, config, tokenizer)
        context = stated_positions(config)
        self.length = length or min(SPAN_LENGTH if self.kind == "spans" else LONGEST, block_length(config))
        if length is not None and length < 2:
            raise OptionError(f"calibration blocks of {length} tokens were asked for, expected at least 2")
        if context is not None and self.length > context:
            raise OptionError(
                f"calibration blocks of {length} tokens were asked for, and the model has positions for {context}: lower it"
            )
        self.raw = self._sampler(self.length).raw_tokens if self.kind == "spans" else self.length

    def batch(self, text: npt.NDArray[Any], starts: Sequence[int], length: int) -> tuple[dict[str, Integers], int]:
        """Blocks of `length` tokens of text from these places on, and how many tokens of text are in them all."""
        if self.kind == "spans":
            sampler = self._sampler(self._input_length(length))
            places = [(_Text(text), SpanCut(start, 0)) for start in starts]
            return sampler.batch(places, [(mix(self._seed), start) for start in starts]), sampler.raw_tokens * len(
                starts
            )
        ids = np.stack([text[start : start + length] for start in starts]).astype(np.int64)
        if self.kind == "causal":
            return {"input_ids": ids}, ids.size
        decoder = np.full_like(ids, self._start)
        decoder[:, 1:] = ids[:, :-1]
        return {"input_ids": ids, "decoder_input_ids": decoder, "labels": ids.copy()}, ids.size

    def _sampler(self, length: int) -> Any:
        return make_sampler(self._tokenizer, SPAN_CORRUPTION, length, document_mask=False, decoder_start=self._start)

    def _input_length(self, raw: int) -> int:
        """The longest encoder input that needs no more tokens of text than that."""
        shapes = ((length, shape_for(T5[0], length)) for length in range(min(self.length, raw + 2), 2, -1))
        return next(length for length, shape in shapes if shape is not None and shape.raw <= raw)


class _Text:
    """Tokens in memory, as far as a sampler needs a `TokenSource`."""

    def __init__(self, tokens: npt.NDArray[Any]) -> None:
        self._tokens = tokens

    def read(self, start: int, count: int) -> npt.NDArray[Any]:
        return self._tokens[start : start + count]


def _cuts(size: int, length: int, wanted: int, seed: int, *, after: int = 0) -> dict[int, int]:
    """Where the blocks begin and how long they are, in the order of their use.

    Args:
        size: tokens of the text.
        length: tokens of a block.
        wanted: how many blocks.
        seed: of their choice and order.
        after: so many others; whole blocks only.
    """
    whole, rest = divmod(size, length)
    order = [length * permuted(number, whole, mix(seed, 2)) for number in range(after, min(whole, after + wanted))]
    if not after and whole < wanted:
        return dict.fromkeys(order, length) | ({whole * length: rest} if rest > 1 else {})
    offset = mix(seed, 1) % (rest + 1)
    return dict.fromkeys((offset + start for start in order), length)


def _batched(cuts: dict[int, int], rows: int) -> Iterator[tuple[list[int], int]]:
    """Blocks of the same length, at most `rows` at a time."""
    for length in sorted(set(cuts.values()), reverse=True):
        starts = [start for start, its in cuts.items() if its == length]
        yield from ((starts[first : first + rows], length) for first in range(0, len(starts), rows))


def _tokens(source: Any, encoder: TextEncoder, wanted: int) -> tuple[str, npt.NDArray[Any]]:
    """What the source is called, and tokens of it: at least `wanted`, if there are as many."""
    text = open_source(as_source(str(source) if isinstance(source, Path) else source), default_cache())
    if isinstance(text, FileText):
        return text.label, _file_tokens(text, encoder, wanted)
    assert isinstance(text, HubText)
    stream = GrowingFile(text, encoder, default_cache(), writes=True)
    try:
        size, _ = stream.size(_OVERSAMPLING * wanted)
        return f"{text.label}@{text.commit[:12]}", stream.read(0, min(size, _OVERSAMPLING * wanted))
    finally:
        stream.close()


def _file_tokens(text: FileText, encoder: TextEncoder, wanted: int) -> npt.NDArray[Any]:
    share = min(1.0, max(_WHOLE, _OVERSAMPLING * _CHARACTERS * wanted) / max(1, text.total_bytes))
    while True:
        tokens = _encoded(text if share == 1 else _thinned(text, share), encoder)
        if share == 1 or len(tokens) >= wanted:
            return tokens
        share = min(1.0, 8 * share)  # most of the bytes were no text, but other fields of its rows


def _thinned(pieces: Iterable[Piece], share: float) -> Iterator[Piece]:
    """A share of the characters, spread evenly; each piece is a document of its own, as its neighbours may be
    missing.
    """
    seen = kept = 0
    for piece in pieces:
        if kept <= share * seen:
            kept += len(piece.text)
            yield piece._replace(last=True)
        seen += len(piece.text)


def _encoded(pieces: Iterable[Piece], encoder: TextEncoder) -> npt.NDArray[Any]:
    parts, begins = [np.empty(0, encoder.dtype)], True
    for batch in batches(pieces):
        parts.append(encoder.encode(batch, begins=begins)[0])
        begins = batch[-1].last
    return np.concatenate(parts)


def usable_tokenizer(folder: Path) -> Any:
    """The checkpoint's tokenizer.

    Raises:
        DataError: there is none, or transformers can't load it.
    """
    try:
        tokenizer = load_tokenizer(folder)
    except Exception as problem:
        first = next((line.strip() for line in str(problem).splitlines() if line.strip()), "")
        raise DataError(
            f"{folder} has no tokenizer that transformers can load ({type(problem).__name__}: {first[:200]}): copy the tokenizer's files "
            "from where the model comes from"
        ) from problem
    # for some model types transformers makes up a tokenizer without a vocabulary if there are no files
    names = {"tokenizer.json", "tokenizer.model", *getattr(tokenizer, "vocab_files_names", {}).values()}
    if not any((folder / name).is_file() for name in names):
        raise DataError(
            f"{folder} has no tokenizer, found none of {', '.join(sorted(names))}: copy them from where the model comes from"
        )
    return tokenizer


def _check_vocabulary(config: dict[str, Any], made: Sequence[tuple[dict[str, Integers], int]], folder: Path) -> None:
    """Refuse tokens that the model has no embedding for; a tokenizer may have more of them than the text uses.

    Raises:
        DataError: there is one.
    """
    size = stated_count(config, VOCABULARY_KEYS)
    largest = max(int(ids.max()) for batch, _ in made for ids in batch.values())
    if size is not None and largest >= size:
        raise DataError(
            f"the tokenizer in {folder} makes the token {largest}, and the model has a vocabulary of {size}: "
            "copy the tokenizer that belongs to it"
        )


def _digest(options: Sequence[Any], made: Sequence[dict[str, Integers]]) -> str:
    digest = hashlib.sha256(json.dumps(options).encode())
    for batch in made:
        for name, ids in sorted(batch.items()):
            digest.update(json.dumps([name, ids.shape]).encode())
            digest.update(ids.astype("<i8").tobytes())
    return digest.hexdigest()


def _tensors(batch: dict[str, Integers]) -> "dict[str, Tensor]":
    import torch

    return {name: torch.from_numpy(np.ascontiguousarray(ids)) for name, ids in batch.items()}
