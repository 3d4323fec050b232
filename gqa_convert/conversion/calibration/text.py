"""Calibration text as a model's input: batches of blocks drawn from all parts of the text.

The blocks are those that uptraining would train on: concatenated documents, each closed by end-of-text, with T5's span
corruption for encoder-decoders that have sentinel tokens. Other encoder-decoders read a block and predict the same
block, as in denoising without noise.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise, zip_longest
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gqa_convert.conversion.calibration.mixture import MadeUpRecords, SharedText
from gqa_convert.conversion.calibration.pairs import pair_batches, pair_fields, read_pairs
from gqa_convert.conversion.calibration.stretched_blocks import stretched
from gqa_convert.conversion.options import BATCH_TOKENS, each_of
from gqa_convert.data.decoder_start import decoder_start
from gqa_convert.data.documents import Piece
from gqa_convert.data.encoders import beginning_of_text, text_encoder
from gqa_convert.data.files import Files
from gqa_convert.data.hub import default_cache
from gqa_convert.data.model_tokenizer import check_vocabulary, usable_tokenizer
from gqa_convert.data.order import mix, permuted
from gqa_convert.data.sources import TextSource, as_source, open_source
from gqa_convert.data.span_corruption import SpanCorruption, has_sentinels, shape_for
from gqa_convert.data.text_generation import OwnText
from gqa_convert.data.token_files import batched, ids_of, tokenize
from gqa_convert.errors import ConfigError, DataError, OptionError
from gqa_convert.families.config_sizes import HIDDEN_SIZE_KEYS
from gqa_convert.families.context_length import (
    SPAN_LENGTH,
    block_length,
    stated_count,
    stated_positions,
)
from gqa_convert.families.loading import is_encoder_decoder, read_config
from gqa_convert.families.records import record_of
from gqa_convert.runtime.json_objects import Config

if TYPE_CHECKING:
    from torch import Tensor

Mixing = Callable[[int], list[SharedText]]
"""Returns what is mixed into the user's text, given the number of tokens that this holds."""

_LEAST = 64
"""Tokens of calibration text; with fewer, anything fits."""
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
        held_out: batches of other blocks of the same text, which decide nothing; empty if the text has no further blocks.
        label: what that text is, for reports on it.
        warning: a message for the user about too little text, or None.
        mixed_in: what was mixed into the text, in words, or empty.
        left_out: what could not be mixed in, and why.
        fresh: batches of still other blocks, for training on text that no batch before has; empty if the text has none.
    """

    batches: "list[dict[str, Tensor]]"
    tokens: int
    sequence_length: int
    digest: str
    description: str
    held_out: "list[dict[str, Tensor]]"
    label: str = ""
    warning: str | None = None
    mixed_in: str = ""
    left_out: tuple[str, ...] = ()
    fresh: "list[dict[str, Tensor]]" = field(default_factory=list)


def calibration_tokens_for(config: Mapping[str, Any]) -> int:
    """The default number of tokens: max(8 d, min(500 d, 24576)) for a hidden_size d, rounded up to whole blocks.

    That is 8 tokens per hidden dimension, and up to 500 below a hidden_size of 3072, where more text still helps and
    costs little. T5 and its relatives get twice as many, because their decoders see a fifth of the text.

    Args:
        config: the content of config.json.

    Raises:
        ConfigError: it states no hidden_size.
    """
    hidden_size = stated_count(config, HIDDEN_SIZE_KEYS)
    if hidden_size is None:
        raise ConfigError(
            f"config.json states no hidden_size (none of {', '.join(HIDDEN_SIZE_KEYS)}): state how many calibration tokens to use"
        )
    tokens = max(_PER_HIDDEN * hidden_size, min(_PER_SMALL_HIDDEN * hidden_size, _SMALL_TOKENS))
    block = calibration_length_for(config)
    if record_of(config).is_t5:
        tokens, block = 2 * tokens, shape_for(SPAN_LENGTH).raw
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
    held_out_tokens: int = 0,
    fresh_tokens: int = 0,
    context: int | None = None,
    mixing: Mixing | None = None,
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
            mapping with further keys such as `text_field` and `split`, whose weight is ignored; or a function of the
            number of tokens that the other texts hold, which returns an `OwnText` once these are read; or a list of
            these, from which blocks are drawn in turn. Where one has too little text, the others contribute more.
        tokens: the number of text tokens, rounded up to whole blocks.
        seed: determines the choice of blocks, their order and the corruption.
        sequence_length: tokens per block (per encoder input for span corruption). The default is the model's context
            length, at most 1024, or 512 for span corruption.
        held_out_tokens: the number of tokens in held-out blocks, rounded up to whole blocks. It does not change which
            other blocks are drawn.
        fresh_tokens: the number of tokens in fresh blocks, likewise; as far as the text that is tokenised has them.
        context: the position up to which blocks of a causal model are stretched; None for blocks without skips.
        mixing: returns what is mixed in, once the text is read; None for nothing.

    Raises:
        OptionError: the sequence length is out of range.
        DataError: the text or the tokenizer can't be read or does not fit the model, or the text has fewer than 2
            tokens.
    """
    config, tokenizer = read_config(model_folder), usable_tokenizer(model_folder)
    blocks = _blocks_of(model_folder, config, tokenizer, sequence_length)
    if is_encoder_decoder(config) and (pairs := _opened_pairs(source)):
        counts = [tokens, held_out_tokens, fresh_tokens]
        return _paired(model_folder, config, tokenizer, pairs, counts, blocks.length, seed)
    wanted = [-(-count // blocks.raw) for count in (tokens, held_out_tokens, fresh_tokens)]
    label, texts, added = _read_all(source, tokenizer, wanted, blocks, mixing)
    parts = _drawn(texts, blocks.raw, wanted, seed)
    made, held_out, fresh = (_batches(blocks, part, context, seed) for part in parts)
    largest = max(int(batch[name].max()) for batch in made for name in _TOKENS & batch.keys())
    check_vocabulary(config, largest, model_folder)

    lengths = [len(block.tokens) for block in parts[0]]
    used, number = sum(lengths), len(lengths)
    length = made[0]["input_ids"].shape[1]
    count = f"{number} block{'s' if number != 1 else ''} of {'up to ' if len({*lengths}) > 1 else ''}{length}"
    reaching = (
        f", every second one stretched to {context} positions" if "position_ids" in made[0] else ""
    )
    warning = None
    if used < tokens:
        warning = f"{label} has only {used} of the {tokens} calibration tokens requested: all of them are used; more text may give a better merge"
    kinds = ", ".join(f"{text.share:.0%} {text.mixed_in}" for text in added)
    return Calibration(
        batches=made,
        tokens=used,
        sequence_length=length,
        digest=digest_of([blocks.kind, blocks.length, context, seed, BATCH_TOKENS, tokens], made),
        description=f"{used} tokens of {label}: {count} {_WORDS[blocks.kind]}{reaching}, seed {seed}{kinds and f'; mixed in: {kinds}'}",
        label=label + (" and what is mixed in" if kinds else ""),
        warning=warning,
        mixed_in=kinds,
        held_out=held_out,
        fresh=fresh,
    )


def _opened_pairs(source: Any) -> list[tuple[str, TextSource, tuple[str, str]]]:
    """The sources with their labels and the fields of their pairs; none where they hold running text.

    Raises:
        DataError: some hold pairs and some do not.
    """
    found, others = [], []
    for given in each_of(source):
        stated = as_source(given.file if isinstance(given, OwnText) else given)
        text = open_source(stated)
        label = given.label if isinstance(given, OwnText) else text.label
        fields = pair_fields(stated, text)
        if fields is None:
            others.append(label)
        else:
            found.append((label, text, fields))
    if found and others:
        raise DataError(
            f"{found[0][0]} holds pairs of source and target, and {others[0]} does not: calibrate on one kind of text"
        )
    return found


def _paired(
    folder: Path,
    config: Config,
    tokenizer: Any,
    opened: Sequence[tuple[str, TextSource, tuple[str, str]]],
    counts: Sequence[int],
    length: int,
    seed: int,
) -> Calibration:
    """Calibration on pairs, drawn from all sources in turn; see `calibration_pairs`."""
    read = [
        read_pairs(
            text, fields, tokenizer, tokens=sum(counts), length=length, seed=mix(seed, number)
        )
        for number, (_, text, fields) in enumerate(opened)
    ]
    pairs = [pair for together in zip_longest(*read) for pair in together if pair is not None]
    (made, held_out, fresh), number = pair_batches(folder, config, tokenizer, pairs, counts)
    sides = ("input_ids", "labels")
    check_vocabulary(
        config, max(int(batch[side].max()) for batch in made for side in sides), folder
    )
    label = " and ".join(label for label, _, _ in opened)
    used = sum(batch[side].numel() for batch in made for side in sides)
    held = sum(pair.size for pair in pairs)
    warning = None
    if held < counts[0]:
        warning = f"{label} has only {held} of the {counts[0]} calibration tokens requested: all of them are used; more pairs may give a better merge"
    return Calibration(
        batches=made,
        tokens=used,
        sequence_length=max(batch["input_ids"].shape[1] for batch in made),
        digest=digest_of(["pairs", length, seed, BATCH_TOKENS, counts[0]], made),
        description=f"{used} tokens of {label}: {number} pairs of source and target, cut to the lengths of others, seed {seed}",
        label=label,
        warning=warning,
        held_out=held_out,
        fresh=fresh,
    )


class _Block(NamedTuple):
    """A block: its place among all tokens, its tokens, and whether spans may be copied over its end."""

    start: int
    tokens: npt.NDArray[Any]
    can_be_copied_into: bool


class _Text(NamedTuple):
    """A text.

    Attributes:
        tokens: [n].
        share: of all blocks.
        can_be_copied_into: whether spans may be copied over the end of a block.
        is_sampled: whether it is a sample in random order, of which more may be drawn another time: its blocks are taken
            from its beginning.
    """

    tokens: npt.NDArray[Any]
    share: float
    can_be_copied_into: bool = True
    is_sampled: bool = False


_WORDS = {
    "causal": "tokens",
    "shifted": "tokens for encoder and decoder",
    "spans": "tokens after span corruption",
}


class _Blocks(NamedTuple):
    """The kind and size of a model's blocks.

    Attributes:
        kind: causal, shifted (the decoder predicts the encoder's input) or spans (T5's span corruption).
        length: the input tokens of a block.
        raw: the tokens of text in a block.
        start: the first token of a decoder's input.
        corruption: of the kind spans.
        begin: with which the tokenizer begins every text, and each block begins; empty if it adds no such token.
    """

    kind: str
    length: int
    raw: int
    start: int = 0
    corruption: SpanCorruption | None = None
    begin: Sequence[int] = ()


def _blocks_of(folder: Path, config: Config, tokenizer: Any, length: int | None) -> _Blocks:
    positions = stated_positions(config)
    if length is not None:
        if length < 2:
            raise OptionError(
                f"the calibration sequence length is {length} tokens, expected at least 2"
            )
        if positions is not None and length > positions:
            raise OptionError(
                f"the calibration sequence length is {length} tokens, and the model has positions for {positions}: lower it"
            )
    length_or_default = length or calibration_length_for(config)
    begin = beginning_of_text(tokenizer)
    if not is_encoder_decoder(config):
        return _Blocks("causal", length_or_default, length_or_default, begin=begin)
    start = decoder_start(folder, config, tokenizer)
    if not has_sentinels(tokenizer):
        return _Blocks("shifted", length_or_default, length_or_default, start, begin=begin)
    length = length or min(SPAN_LENGTH, block_length(config))
    corruption = SpanCorruption(tokenizer, start, length)
    return _Blocks("spans", length, corruption.raw, start, corruption)


def _drawn(
    texts: Sequence[_Text], length: int, counts: Sequence[int], seed: int
) -> list[list[_Block]]:
    """Blocks that are drawn from the texts by their shares, as far as a text has blocks left: as many as each count says,
    without overlap. Where there are fewer than the first count, all texts are used up in blocks for it, and the last block
    of a text is shorter.

    Args:
        texts: the texts.
        length: the tokens of a block.
        counts: the number of blocks of each part.
        seed: determines their choice and order.
    """
    uses_all = sum(len(text.tokens) // length for text in texts) < counts[0]
    begin, ranked = 0, []
    for number, text in enumerate(texts):
        key = mix(seed, number) if number else seed
        whole, rest = divmod(len(text.tokens), length)
        first, places = 0, list(range(whole))
        if not text.is_sampled:
            first = 0 if uses_all else mix(key, 1) % (rest + 1)
            places = [permuted(at, whole, mix(key, 2)) for at in places]
        if uses_all and rest > 1:
            places.append(whole)
        for rank, at in enumerate(places):
            start = first + length * at
            block = _Block(
                begin + start, text.tokens[start : start + length], text.can_be_copied_into
            )
            ranked.append(((rank + 0.5) / text.share, block))
        begin += len(text.tokens)
    blocks = [block for _, block in sorted(ranked, key=itemgetter(0))]
    ends = np.cumsum(counts).tolist()
    if uses_all:
        ends[0] = len(blocks)
    return [blocks[begin:end] for begin, end in pairwise([0, *ends])]


def _batches(
    blocks: _Blocks, drawn: Sequence[_Block], context: int | None, seed: int
) -> "list[dict[str, Tensor]]":
    """Batches of blocks of one length, those of the longest blocks first.

    Args:
        blocks: their kind and size.
        drawn: their tokens.
        context: the position up to which causal blocks are stretched.
        seed: of spans and positions.
    """
    import torch

    rows = max(1, BATCH_TOKENS // blocks.length)
    made = []
    for length in sorted({len(block.tokens) for block in drawn}, reverse=True):
        alike = [block for block in drawn if len(block.tokens) == length]
        for first in range(0, len(alike), rows):
            part = alike[first : first + rows]
            ids = np.stack([block.tokens for block in part]).astype(np.int64)
            for row in ids:
                if row[:1].tolist() != list(blocks.begin):  # the last token makes room
                    row[:] = [*blocks.begin, *row][:length]
            if blocks.corruption is not None:
                batch = blocks.corruption.batch(ids, [(mix(seed), block.start) for block in part])
            elif blocks.kind == "causal":
                copied = [block.can_be_copied_into for block in part]
                batch = stretched(ids, first, context, seed, copied)
            else:
                decoder = np.roll(ids, 1, axis=1)
                decoder[:, 0] = blocks.start
                batch = {"input_ids": ids, "decoder_input_ids": decoder, "labels": ids.copy()}
            made.append(
                {
                    name: torch.from_numpy(np.ascontiguousarray(array))
                    for name, array in batch.items()
                }
            )
    return made


def _read_all(
    source: Any, tokenizer: Any, wanted: Sequence[int], blocks: _Blocks, mixing: Mixing | None
) -> tuple[str, list[_Text], list[SharedText]]:
    """The labels of the user's texts, the tokens of all texts, and what is mixed in. Of that, whole blocks are taken, and no
    more than its share of what the user's texts hold.
    """
    sources = each_of(source)
    if not sources:
        raise DataError(
            "the list of calibration texts is empty: name a file, a folder, a pattern or a dataset on the Hub"
        )
    # the text that blocks are drawn from does not depend on the number of further blocks
    read = partial(
        _read, tokenizer=tokenizer, count=wanted[0] * blocks.raw, closed=blocks.kind != "spans"
    )
    found: dict[int, tuple[str, npt.NDArray[Any]]] = {}
    for number in sorted(range(len(sources)), key=lambda number: callable(sources[number])):
        given = sources[number]
        held = sum(len(tokens) for _, tokens in found.values())
        found[number] = read(given(held) if callable(given) else given)
        label, tokens = found[number]
        if len(tokens) < _LEAST:
            raise DataError(
                f"{label} holds {len(tokens)} tokens, calibration needs at least {_LEAST}, and thousands to be of use: name more text"
            )
    held = sum(len(tokens) for _, tokens in found.values())
    added = mixing(held) if mixing else []
    left = 1 - sum(text.share for text in added)
    users = [found[number] for number in range(len(sources))]
    texts = [_Text(tokens, left / len(sources)) for _, tokens in users]
    for text in added:
        most = int(text.share * held / left) // blocks.raw
        if isinstance(text.source, MadeUpRecords):
            count = min(most, math.ceil(text.share * sum(wanted)))
            tokens = text.source.blocks(tokenizer, blocks.raw, count)
            texts.append(_Text(tokens, text.share, can_be_copied_into=False, is_sampled=True))
        else:
            _, tokens = read(text.source)
            is_sampled = isinstance(text.source, OwnText)
            texts.append(_Text(tokens[: most * blocks.raw], text.share, is_sampled=is_sampled))
    return " and ".join(label for label, _ in users), texts, added


def _read(source: Any, tokenizer: Any, count: int, *, closed: bool) -> tuple[str, npt.NDArray[Any]]:
    """The label of the source, and at least `count` of its tokens, or all if it has fewer."""
    stated = as_source(source.file if isinstance(source, OwnText) else source)
    text = open_source(stated)
    encoder = text_encoder(stated, text, tokenizer, closed=closed, chats=True)
    most = _OVERSAMPLING * count
    if not isinstance(text, Files):
        stored = tokenize(text, encoder, default_cache(), needed=most)
        return f"{text.label}@{text.commit[:12]}", stored.read(0, min(stored.size, most))
    label = source.label if isinstance(source, OwnText) else text.label
    share = min(1.0, max(_WHOLE, _CHARACTERS * most) / max(1, text.total_bytes))
    while True:
        batches = batched(_thinned(text.pieces(encoder.fields), share))
        tokens = np.concatenate(
            [np.empty(0, np.int64), *(ids_of(encoder.encode(batch)) for batch in batches)]
        )
        if share == 1 or len(tokens) >= count:
            return label, tokens
        share = min(1.0, 8 * share)  # most of the bytes belonged to other fields of the rows


def _thinned(pieces: Iterable[Piece], share: float) -> Iterator[Piece]:
    """An evenly spread share of the characters; each piece is a separate document, because its neighbours may be missing
    unless the share is 1.
    """
    seen = kept = 0
    for piece in pieces:
        if kept <= share * seen:
            kept += len(str(piece.text))
            yield piece if share == 1 else piece._replace(first=True, last=True)
        seen += len(str(piece.text))


def digest_of(settings: Sequence[Any], batches: "Iterable[Mapping[str, Tensor]]") -> str:
    """SHA-256 over settings and the tensors of batches."""
    import torch

    digest = hashlib.sha256(json.dumps(settings).encode())
    for batch in batches:
        for name, tensor in sorted(batch.items()):
            digest.update(json.dumps([name, tensor.shape]).encode())
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
