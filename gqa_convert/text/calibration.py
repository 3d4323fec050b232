"""Calibration text as a model's input: batches of blocks drawn from all parts of the text.

The blocks are those that uptraining would train on: concatenated documents, each closed by end-of-text, with T5's span
corruption for encoder-decoders that have sentinel tokens. Other encoder-decoders read a block and predict the same
block, as in denoising without noise.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gqa_convert.checkpoint.strict_json import Config
from gqa_convert.errors import ConfigError, DataError, OptionError
from gqa_convert.families.config_sizes import HIDDEN_SIZE_KEYS, VOCABULARY_KEYS
from gqa_convert.families.context_length import (
    SPAN_LENGTH,
    block_length,
    is_t5_like,
    stated_count,
    stated_positions,
)
from gqa_convert.families.loading import TASKS, auto_class, is_encoder_decoder, load_tokenizer, read_config
from gqa_convert.text.chat_encoding import ChatEncoder
from gqa_convert.text.chats import ChatColumns
from gqa_convert.text.decoder_start import decoder_start
from gqa_convert.text.documents import Piece
from gqa_convert.text.hub_rows import HubText
from gqa_convert.text.marked_tokens import ids_of
from gqa_convert.text.objectives import SPAN_CORRUPTION
from gqa_convert.text.order import Integers, mix, permuted
from gqa_convert.text.own_text import OwnText
from gqa_convert.text.samples import make_sampler
from gqa_convert.text.sources import as_source, open_source
from gqa_convert.text.spans import T5, SpanCut, has_sentinels, shape_for
from gqa_convert.text.stretched_blocks import stretched, stretches
from gqa_convert.text.text_files import FileText
from gqa_convert.text.token_files import default_cache
from gqa_convert.text.token_streams import GrowingFile
from gqa_convert.text.tokenizing import Encoder, TextEncoder, batches

if TYPE_CHECKING:
    from torch import Tensor

_TOKENS = frozenset({"input_ids", "decoder_input_ids", "labels"})
_PER_HIDDEN = 8
_PER_SMALL_HIDDEN = 500
_SMALL_TOKENS = 24_576
"""The limit up to which small models get more tokens per hidden dimension."""

LENGTH = 1024
"""The most tokens of a block by default. The same number of tokens in longer blocks comes from fewer documents."""

_OVERSAMPLING = 16
"""From a text that is larger, this many times the requested number of tokens is tokenised before blocks are drawn."""

_CHARACTERS = 4
"""The estimated characters per token. If the text yields fewer tokens than estimated, a larger share of it is read."""

_WHOLE = 1 << 22
"""The size in bytes up to which files are tokenised in full, regardless of the number of tokens requested."""


@dataclass(frozen=True)
class Calibration:
    """Batches of calibration text.

    Attributes:
        batches: keyword arguments of the model's forward pass, int64 tensors on the CPU. `input_ids` [b, L] for causal
            models, with `position_ids` and `attention_mask` where positions skip (`stretched_blocks`); for
            encoder-decoders also `decoder_input_ids` and `labels` [b, Ld], `labels` being the tokens to predict at each
            position (not shifted). The blocks of a batch are equally long, and none is padded; a short text ends in a
            shorter block, which forms its own batch.
        tokens: the number of text tokens in all blocks.
        sequence_length: the input tokens of the longest block.
        digest: SHA-256 over `batches` and the settings; equal digests mean equal batches.
        description: a description of the text, for reports.
        warning: a message for the user, or None.
        held_out: batches of other blocks of the same text, for evaluation; empty if the text has no further blocks.
        fresh: batches of still other blocks, for training on text that no batch before has; empty if the text has none.
    """

    batches: "list[dict[str, Tensor]]"
    tokens: int
    sequence_length: int
    digest: str
    description: str
    warning: str | None = None
    held_out: "list[dict[str, Tensor]]" = field(default_factory=list)
    fresh: "list[dict[str, Tensor]]" = field(default_factory=list)


def calibration_tokens_for(config: Any) -> int:
    """The default number of tokens: max(8 d, min(500 d, 24576)) for a hidden_size d, rounded up to whole blocks.

    That is 8 tokens per hidden dimension, and up to 500 below a hidden_size of 3072, where more text still helps and
    costs little. T5 and its relatives get twice as many, because their decoders see a fifth of the text.

    Args:
        config: the content of config.json, or a transformers config.

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
    block = calibration_length_for(values)
    if is_t5_like(values):
        shape = shape_for(T5[0], SPAN_LENGTH)
        assert shape is not None
        tokens, block = 2 * tokens, shape.raw
    return -(-tokens // block) * block


def calibration_length_for(config: Mapping[str, Any]) -> int:
    """The default number of tokens of a block: the model's context, at most `LENGTH`."""
    return min(LENGTH, block_length(config))


def calibration_batches(
    model_folder: Path,
    source: Any,
    tokens: int,
    *,
    seed: int,
    sequence_length: int | None = None,
    batch_tokens: int = 4096,
    held_out_tokens: int = 0,
    fresh_tokens: int = 0,
    context: int | None = None,
) -> Calibration:
    """Draw blocks of text for a model from the whole text without replacement; a text with no more tokens is used in
    full.

    Files of up to 4 MiB, or of up to 64 characters per requested token, are tokenised in full. From larger files,
    documents (or parts of long ones) are taken at even intervals up to that size, each as a separate document. From a
    Hub dataset, 16 tokens per requested token are streamed from its beginning and kept in the token cache.

    Args:
        model_folder: a local checkpoint with its tokenizer; its weights are not read.
        source: a file, a folder, a pattern, the id of a Hub dataset or `python-stdlib`, of text or, rendered by the chat
            template, of conversations in rows with `messages`; or, as in a recipe's `data`, a
            mapping with further keys such as `text_field` and `split`, whose weight is ignored; or an `OwnText`; or a list of these,
            from which blocks are drawn in equal shares. Where one has too little text, the others contribute more.
        tokens: the number of text tokens, rounded up to whole blocks.
        seed: determines the choice of blocks, their order and the corruption.
        sequence_length: tokens per block (per encoder input for span corruption). The default is the model's context
            length, at most 1024, or 512 for span corruption.
        batch_tokens: the most tokens in a batch, unless a single block has more.
        held_out_tokens: the number of tokens in held-out blocks, rounded up to whole blocks. It does not change which
            other blocks are drawn.
        fresh_tokens: the number of tokens in fresh blocks, likewise; as far as the text that is tokenised has them.
        context: the position up to which blocks of a causal model are stretched; None for blocks without skips.

    Raises:
        OptionError: a number is out of range, or the model's encoder does not read text.
        DataError: the text or the tokenizer can't be read or does not fit the model, or the text has fewer than 2
            tokens.
    """
    config = read_config(model_folder)
    if tokens < 1:
        raise OptionError(f"--calibration-tokens is {tokens}, expected a number above 0")
    if batch_tokens < 1:
        raise OptionError(f"batch_tokens is {batch_tokens}, expected a number above 0")
    if is_encoder_decoder(config) and auto_class(config) == TASKS[2]:
        raise OptionError(
            f"calibration needs an encoder that reads text, and the encoder of {config.get('model_type')} reads audio: "
            "use a method without calibration"
        )
    tokenizer = usable_tokenizer(model_folder)
    blocks = _Blocks(model_folder, config, tokenizer, sequence_length, context, seed)
    needed = -(-tokens // blocks.raw)
    judging, further = -(-held_out_tokens // blocks.raw), -(-fresh_tokens // blocks.raw)
    # the text that blocks are drawn from does not depend on the number of further blocks
    label, text, sizes = _all_tokens(source, tokenizer, needed * blocks.raw, closed=blocks.kind != "spans")
    cuts, held_out, fresh = _draws(sizes, blocks.raw, (needed, judging, further), seed)
    rows = max(1, batch_tokens // blocks.length)
    made, judges, unseen = (
        [blocks.batch(text, starts, length, first) for starts, length, first in _batched(each, rows)]
        for each in (cuts, held_out, fresh)
    )
    largest = max(int(batch[name].max()) for batch, _ in made for name in _TOKENS & batch.keys())
    check_vocabulary(config, largest, model_folder)
    used, length = sum(count for _, count in made), max(batch["input_ids"].shape[1] for batch, _ in made)
    number = sum(len(batch["input_ids"]) for batch, _ in made)
    description = (
        f"{used} tokens of {label}: {number} block{'s' if number != 1 else ''} of {'up to ' if len({*cuts.values()}) > 1 else ''}{length} "
        f"{blocks.WORDS[blocks.kind]}{blocks.reaching()}, seed {seed}"
    )
    warning = None
    if used < tokens:
        warning = f"{label} has only {used} of the {tokens} calibration tokens requested: all of them are used; more text may give a better merge"
    settings = [blocks.kind, blocks.length, context, seed, batch_tokens, tokens]
    batches, held_out_batches, fresh_batches = (
        [_tensors(batch) for batch, _ in each] for each in (made, judges, unseen)
    )
    digest = digest_of(settings, batches)
    return Calibration(batches, used, length, digest, description, warning, held_out_batches, fresh_batches)


class _Blocks:
    """The kind and size of a model's blocks; makes batches of them.

    Attributes:
        kind: causal, shifted (the decoder predicts the encoder's input) or spans (T5's span corruption).
        length: the input tokens of a block.
        raw: the tokens of text in a block.
    """

    WORDS = {"causal": "tokens", "shifted": "tokens for encoder and decoder", "spans": "tokens after span corruption"}  # noqa: RUF012

    def __init__(
        self, folder: Path, config: Config, tokenizer: Any, length: int | None, reach: int | None, seed: int
    ) -> None:
        self._tokenizer, self._reach, self._seed = tokenizer, reach, seed
        self.kind = "causal"
        if is_encoder_decoder(config):
            self.kind = "spans" if has_sentinels(tokenizer) else "shifted"
            self._start = decoder_start(folder, config, tokenizer)
        context = stated_positions(config)
        self.length = length or (
            min(SPAN_LENGTH, block_length(config)) if self.kind == "spans" else calibration_length_for(config)
        )
        if length is not None and length < 2:
            raise OptionError(f"the calibration sequence length is {length} tokens, expected at least 2")
        if context is not None and self.length > context:
            raise OptionError(
                f"the calibration sequence length is {length} tokens, and the model has positions for {context}: lower it"
            )
        self.raw = self._sampler(self.length).raw_tokens if self.kind == "spans" else self.length

    def reaching(self) -> str:
        """How the description says that blocks are stretched."""
        far = self.kind == "causal" and stretches(self.length, self._reach)
        return f", every second one stretched to {self._reach} positions" if far else ""

    def batch(
        self, text: npt.NDArray[Any], starts: Sequence[int], length: int, first: int
    ) -> tuple[dict[str, Integers], int]:
        """A batch of blocks of `length` text tokens that begin at these places, and the number of text tokens in it.

        `first` is the number of the first block among all.
        """
        if self.kind == "spans":
            sampler = self._sampler(self._input_length(length))
            places = [(_Text(text), SpanCut(start, 0)) for start in starts]
            return sampler.batch(places, [(mix(self._seed), start) for start in starts]), sampler.raw_tokens * len(
                starts
            )
        ids = np.stack([text[start : start + length] for start in starts]).astype(np.int64)
        if self.kind == "causal":
            return stretched(ids, first, self._reach, self._seed), ids.size
        decoder = np.full_like(ids, self._start)
        decoder[:, 1:] = ids[:, :-1]
        return {"input_ids": ids, "decoder_input_ids": decoder, "labels": ids.copy()}, ids.size

    def _sampler(self, length: int) -> Any:
        return make_sampler(self._tokenizer, SPAN_CORRUPTION, length, document_mask=False, decoder_start=self._start)

    def _input_length(self, raw: int) -> int:
        """The length of the longest encoder input that needs at most this many tokens of text."""
        shapes = ((length, shape_for(T5[0], length)) for length in range(min(self.length, raw + 2), 2, -1))
        return next(length for length, shape in shapes if shape is not None and shape.raw <= raw)


class _Text:
    """Tokens in memory, with the part of the `TokenSource` interface that samplers use."""

    def __init__(self, tokens: npt.NDArray[Any]) -> None:
        self._tokens = tokens

    def read(self, start: int, count: int) -> npt.NDArray[Any]:
        return self._tokens[start : start + count]


def _cuts(size: int, length: int, count: int, seed: int, *, after: int = 0) -> dict[int, int]:
    """The first token and the length of each block, in the order in which the blocks are used.

    Args:
        size: the number of tokens in the text.
        length: the tokens per block.
        count: the number of blocks.
        seed: determines their choice and order.
        after: how many blocks of the order to skip; if not 0, only whole blocks are returned.
    """
    whole, rest = divmod(size, length)
    order = [length * permuted(number, whole, mix(seed, 2)) for number in range(after, min(whole, after + count))]
    if not after and whole < count:
        return dict.fromkeys(order, length) | ({whole * length: rest} if rest > 1 else {})
    offset = mix(seed, 1) % (rest + 1)
    return dict.fromkeys((offset + start for start in order), length)


def _draws(sizes: Sequence[int], length: int, counts: Sequence[int], seed: int) -> list[dict[int, int]]:
    """As `_cuts` for each count, without overlap, from texts of these sizes that stand behind one another."""
    drawn, found = [0] * len(sizes), []
    for count in counts:
        shares = _shares([size // length - done for size, done in zip(sizes, drawn, strict=True)], count)
        starts = np.cumsum([0, *sizes]).tolist()
        each = [
            [
                (begin + start, its)
                for start, its in _cuts(size, length, share, mix(seed, number) if number else seed, after=done).items()
            ]
            for number, (begin, size, share, done) in enumerate(zip(starts, sizes, shares, drawn, strict=False))
        ]
        found.append(dict(cut for cuts in zip_longest(*each) for cut in cuts if cut is not None))
        drawn = [done + share for done, share in zip(drawn, shares, strict=True)]
    return found


def _shares(available: Sequence[int], count: int) -> list[int]:
    """How many of `count` blocks each text contributes: equally many, as far as it has them. Where all texts together
    have too few, each is asked for all blocks.
    """
    if sum(available) < count:
        return [count] * len(available)
    shares = [0] * len(available)
    while left := count - sum(shares):
        open_ones = [number for number, most in enumerate(available) if shares[number] < most]
        for number in open_ones[:left]:
            shares[number] += max(1, min(left // len(open_ones), available[number] - shares[number]))
    return shares


def _batched(cuts: dict[int, int], rows: int) -> Iterator[tuple[list[int], int, int]]:
    """Blocks of the same length, at most `rows` at a time, and the number of the first of them."""
    for length in sorted(set(cuts.values()), reverse=True):
        starts = [start for start, its in cuts.items() if its == length]
        yield from ((starts[first : first + rows], length, first) for first in range(0, len(starts), rows))


def _all_tokens(source: Any, tokenizer: Any, count: int, *, closed: bool) -> tuple[str, npt.NDArray[Any], list[int]]:
    """The labels of all sources, their tokens one behind the other, and how many each has."""
    sources = list(source) if isinstance(source, Sequence) and not isinstance(source, str) else [source]
    if not sources:
        raise DataError(
            "the list of calibration texts is empty: name a file, a folder, a pattern or a dataset on the Hub"
        )
    each = [_tokens(one, tokenizer, count, closed=closed) for one in sources]
    for label, text in each:
        if len(text) < 2:
            raise DataError(f"{label} holds {len(text)} tokens, calibration needs at least 2: name more text")
    texts = [text for _, text in each]
    return " and ".join(label for label, _ in each), np.concatenate(texts), [len(text) for text in texts]


def _tokens(source: Any, tokenizer: Any, count: int, *, closed: bool) -> tuple[str, npt.NDArray[Any]]:
    """The label of the source, and at least `count` of its tokens, or all if it has fewer."""
    given = source.file if isinstance(source, OwnText) else source
    stated = as_source(str(given) if isinstance(given, Path) else given)
    text = open_source(stated, default_cache(), chats=True)
    label = source.label if isinstance(source, OwnText) else text.label
    chats = isinstance(text.columns, ChatColumns)
    encoder: Encoder = ChatEncoder(tokenizer, "all") if chats else TextEncoder(tokenizer, closed=closed)
    if isinstance(text, FileText):
        return label, ids_of(_file_tokens(text, encoder, count))
    assert isinstance(text, HubText)
    stream = GrowingFile(text, encoder, default_cache(), writes=True)
    try:
        size, _ = stream.size(_OVERSAMPLING * count)
        return f"{label}@{text.commit[:12]}", ids_of(stream.read(0, min(size, _OVERSAMPLING * count)))
    finally:
        stream.close()


def _file_tokens(text: FileText, encoder: Encoder, count: int) -> npt.NDArray[Any]:
    share = min(1.0, max(_WHOLE, _OVERSAMPLING * _CHARACTERS * count) / max(1, text.total_bytes))
    while True:
        tokens = _encoded(text if share == 1 else _thinned(text, share), encoder)
        if share == 1 or len(tokens) >= count:
            return tokens
        share = min(1.0, 8 * share)  # most of the bytes belonged to other fields of the rows


def _thinned(pieces: Iterable[Piece], share: float) -> Iterator[Piece]:
    """An evenly spread share of the characters; each piece is a separate document, because its neighbours may be
    missing.
    """
    seen = kept = 0
    for piece in pieces:
        if kept <= share * seen:
            kept += len(piece.text)
            yield piece._replace(last=True)
        seen += len(piece.text)


def _encoded(pieces: Iterable[Piece], encoder: Encoder) -> npt.NDArray[Any]:
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
            "from the model's repository"
        ) from problem
    # for some model types transformers creates a tokenizer without a vocabulary if the files are missing
    names = {"tokenizer.json", "tokenizer.model", *getattr(tokenizer, "vocab_files_names", {}).values()}
    if not any((folder / name).is_file() for name in names):
        raise DataError(
            f"{folder} has no tokenizer; none of these files was found: {', '.join(sorted(names))}: copy them from the model's repository"
        )
    return tokenizer


def check_vocabulary(config: Config, largest: int, folder: Path) -> None:
    """Refuse text with tokens that the model has no embedding for.

    Args:
        config: of the model.
        largest: the largest token of the text.
        folder: of the tokenizer.

    Raises:
        DataError: the text has such a token.
    """
    size = stated_count(config, VOCABULARY_KEYS)
    if size is not None and largest >= size:
        raise DataError(
            f"the tokenizer in {folder} produces token {largest}, and the model has a vocabulary of {size}: "
            "copy the tokenizer that belongs to it"
        )


def digest_of(settings: Sequence[Any], batches: "Iterable[Mapping[str, Tensor]]") -> str:
    """SHA-256 over settings and the tensors of batches."""
    import torch

    digest = hashlib.sha256(json.dumps(settings).encode())
    for batch in batches:
        for name, tensor in sorted(batch.items()):
            digest.update(json.dumps([name, tensor.shape]).encode())
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _tensors(batch: dict[str, Integers]) -> "dict[str, Tensor]":
    import torch

    return {name: torch.from_numpy(np.ascontiguousarray(ids)) for name, ids in batch.items()}
