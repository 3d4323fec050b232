"""What a model is scored on: examples, each of which it reads in one forward pass, of text or of sound.

Shape legend: n scored tokens of all examples, b examples of a batch, L positions of a row.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gqa_convert.data.documents import FieldError, Fields, Piece
from gqa_convert.data.encoders import ChatEncoder, holds_conversations
from gqa_convert.data.files import Files
from gqa_convert.data.model_tokenizer import beginning_of_text
from gqa_convert.data.order import Integers, mix
from gqa_convert.data.pairs import shortened
from gqa_convert.data.sampler import IGNORED
from gqa_convert.data.sources import Source, open_source
from gqa_convert.data.span_corruption import SpanCorruption
from gqa_convert.data.speech import AudioFile, SpeechModel, cut_windows
from gqa_convert.errors import DataError
from gqa_convert.measuring import StageProgress

BLOCK = 2048
"""The bytes in a block of text, the unit over which standard errors are computed."""
STREAM_TOKENS = 1_000_000
"""The default number of tokens, or of pairs, read from a Hub dataset, because some datasets never end."""

Array = npt.NDArray[Any]
Doubles = npt.NDArray[np.float64]
Normal = Callable[[str], str]
"""Gives texts that say the same one spelling."""


class Example(NamedTuple):
    """The input of a row, of whose predictions the last t are scored.

    Attributes:
        read: the tokens that a decoder reads.
        targets: [t], the tokens to predict.
        blocks: [t], the number of the block that each belongs to: some kilobytes of a document, or an example.
        sizes: [t], the UTF-8 bytes of text that each covers; None if that is not defined.
        encoder: arguments of the forward pass for an encoder: the tokens that it reads and their mask, or `encoder_outputs`,
            what it made of a sound, [positions, hidden_size].
    """

    read: Integers
    targets: Integers
    blocks: Integers
    sizes: Integers | None = None
    encoder: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Material:
    """Everything that a model is scored on.

    Attributes:
        examples: with their n scored tokens.
        block_count: the number of blocks.
        note: what was left out or cut, None for nothing.
        spoken: what was said in each example, and what a model that hears wrote; empty for text.
        normal: gives what is spoken one spelling.
    """

    examples: Sequence[Example]
    block_count: int
    note: str | None = None
    spoken: Sequence[tuple[str, str]] = ()
    normal: Normal = str

    @property
    def largest(self) -> int:
        """The largest token."""
        return int(max(max(example.read.max(), example.targets.max()) for example in self.examples))

    @cached_property
    def blocks(self) -> Integers:
        """The block of each scored token, [n]."""
        return np.concatenate([example.blocks for example in self.examples])

    @cached_property
    def sizes(self) -> Integers | None:
        """The bytes of text that each scored token covers, [n]; None if that is not defined."""
        sizes = [example.sizes for example in self.examples if example.sizes is not None]
        return np.concatenate(sizes) if sizes else None

    def by_block(self, values: Array) -> Doubles:
        """Sums of the scored tokens' values in each block, in the order of the text: [block_count]."""
        return np.bincount(self.blocks, values, self.block_count).astype(np.float64)

    def batches(self, size: int) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Keyword arguments of a forward pass on so many examples, and the tokens [b, L] to predict, or -100 where nothing is
        scored. Rows are padded on the right: later tokens can't change a decoder's predictions.
        """
        for first in range(0, len(self.examples), size):
            examples = self.examples[first : first + size]
            inputs = {
                name: _padded([example.encoder[name] for example in examples])
                for name in examples[0].encoder
            }
            inputs["decoder_input_ids" if inputs else "input_ids"] = _padded(
                [example.read for example in examples]
            )
            labels = []
            for example in examples:
                unscored = len(example.read) - len(example.targets)
                labels.append(np.pad(example.targets, (unscored, 0), constant_values=IGNORED))
            yield inputs, _padded(labels, IGNORED)


def _longest_first(examples: Sequence[Example]) -> list[Example]:
    """Examples so that memory runs out at the beginning if at all, and little padding is needed."""
    return sorted(
        examples,
        key=lambda each: len(each.read) + len(each.encoder.get("input_ids", ())),
        reverse=True,
    )


def _padded(rows: Sequence[Any], value: int = 0) -> Tensor:
    """Rows [b, L, ...], followed by a value."""
    return pad_sequence(
        [torch.as_tensor(row) for row in rows], batch_first=True, padding_value=value
    )


def read_documents(
    source: Source, tokenizer: Any, limit: int | None, progress: StageProgress
) -> list[Piece]:
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
    fields = Fields((source.text_field,))
    options = "--text-field"
    chats = None
    if source.source_field and source.target_field:
        fields = Fields((source.source_field, source.target_field), "pair")
        options = "--source-field and --target-field"
    elif holds_conversations(source, text):
        chats = ChatEncoder(tokenizer)
        fields = chats.fields
    if limit is None and not isinstance(text, Files):
        limit = STREAM_TOKENS
    found = []
    read = 0
    try:
        for piece in text.pieces(fields):
            if chats:
                piece = chats.rendered(piece)
            found.append(piece)
            if fields.holds == "pair":
                for field, side in zip(fields.names, piece.text, strict=True):
                    if not side:
                        raise DataError(
                            f"{piece.where}: {field!r} is empty, expected text: remove the row, or name another field"
                        )
                read += 1
            elif limit is not None:
                sizes = encode(tokenizer, piece.text, split_special_tokens=not piece.is_rendered)[
                    1
                ][: limit - read]
                read += len(sizes)
                if read == limit:
                    found[-1] = piece._replace(
                        text=piece.text.encode()[: sizes.sum()].decode(), last=True
                    )
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


def text_material(pieces: Sequence[Piece], tokenizer: Any, *, window: int) -> Material:
    """A text for a causal model. Each token of a document is predicted once, except the first: from the beginning of its
    window, or from the beginning-of-text token, if the tokenizer has one. A window begins with it where the tokenizer
    begins every text so. A conversation begins as its chat template writes it.

    Args:
        pieces: documents or parts of them, in order.
        tokenizer: the model's.
        window: the most tokens that the model reads at once.

    Raises:
        DataError: the text has no token to predict.
    """
    begin = np.array([] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id], np.int64)
    again = np.array(beginning_of_text(tokenizer), np.int64)
    step = max(1, window - len(again))
    examples = []
    first_block = 0
    parts: list[tuple[Integers, Integers]] = []
    for piece in pieces:
        if not parts and not piece.is_rendered:
            parts.append((begin, np.zeros_like(begin)))
        parts.append(encode(tokenizer, piece.text, split_special_tokens=not piece.is_rendered))
        if not piece.last:
            continue
        ids, sizes = map(np.concatenate, zip(*parts, strict=True))
        blocks = first_block + np.maximum(sizes.cumsum() - 1, 0) // BLOCK
        for start in range(0, len(ids) - 1, step):
            scored = slice(start + 1, start + 1 + step)
            read = ids[start:-1][:step]
            read = np.concatenate([again, read]) if start else read
            examples.append(Example(read, ids[scored], blocks[scored], sizes[scored]))
        first_block += -(-int(sizes.sum()) // BLOCK)
        parts = []
    if not examples:
        raise DataError(
            "the text has no token with a preceding one to be predicted from: name more text"
        )
    return Material(_longest_first(examples), first_block)


def span_material(pieces: Sequence[Piece], tokenizer: Any, *, start: int, length: int) -> Material:
    """A text with 15% of its tokens removed in spans of three, as in T5's pretraining; the spans and their sentinels
    are scored.

    Args:
        pieces: documents or parts of them, in order.
        tokenizer: of a T5 model.
        start: the first token of the decoder's input.
        length: tokens of the encoder's input.

    Raises:
        DataError: no span fits the length, the tokenizer has too few sentinels, or the text is shorter than one
            example. A remainder at the end of the text is not used.
    """
    try:
        corruption = SpanCorruption(tokenizer, start, length)
    except DataError as problem:  # in the words of a recipe
        raise DataError(str(problem).replace("sequence_length", "--window")) from None
    ids = np.concatenate([encode(tokenizer, piece.text)[0] for piece in pieces])
    raw = corruption.raw
    count = len(ids) // raw
    if not count:
        raise DataError(
            f"the text comes to {len(ids)} tokens, and an example of span corruption with {length} encoder tokens takes "
            f"{raw}: name more text, or lower --window"
        )
    keys = [(mix(0), number) for number in range(count)]
    made = corruption.batch(ids[: count * raw].reshape(count, raw), keys)
    examples = []
    rows = zip(made["input_ids"], made["decoder_input_ids"], made["labels"], strict=True)
    for number, (source, read, targets) in enumerate(rows):
        examples.append(
            Example(read, targets, np.full_like(targets, number), encoder={"input_ids": source})
        )
    return Material(examples, count)


def pair_material(
    pieces: Sequence[Piece], tokenizer: Any, *, start: int | None, length: int
) -> Material:
    """Pairs of a source and a target, each with the special tokens of the tokenizer, which are scored too.

    Args:
        pieces: sources and targets.
        tokenizer: the model's.
        start: the first token of the decoder's input; None for the target's last token, with which mBART's begins.
        length: maximum number of tokens of each; a longer text is cut before its last one, end-of-text.
    """
    examples = []
    truncated = 0
    for number, piece in enumerate(pieces):
        source, target = piece.text
        read, _ = encode(tokenizer, source, add_special_tokens=True)
        written, nbytes = encode(tokenizer, target, "text_target", add_special_tokens=True)
        truncated += max(len(read), len(written)) > length
        read, targets, sizes = (shortened(each, length) for each in (read, written, nbytes))
        begin = targets[-1] if start is None else start
        decoder = np.concatenate([[begin], targets[:-1]])
        encoder = {"input_ids": read, "attention_mask": np.ones_like(read)}
        examples.append(Example(decoder, targets, np.full_like(targets, number), sizes, encoder))
    note = f"{truncated} pairs were cut to the window" if truncated else None
    return Material(_longest_first(examples), len(examples), note)


def speech_material(
    speech: SpeechModel,
    files: Sequence[AudioFile],
    *,
    batch: int,
    tokens: int | None,
    progress: StageProgress,
) -> Material:
    """Sounds with their texts, on which the encoder runs once. Those without words and those longer than the encoder's
    window are left out, and counted.

    Args:
        speech: the model, which hears the language of each sound too.
        files: with their texts.
        batch: sounds at a time.
        tokens: after how many tokens to stop; None for all files.
        progress: called with the number of files that are done, and of all.

    Raises:
        DataError: a file has no text or can't be read, or all are too long.
    """
    from transformers.models.whisper.english_normalizer import (
        BasicTextNormalizer,
        EnglishTextNormalizer,
    )

    if any(file.text is None for file in files):
        raise DataError(
            "the folder has no texts, with which models are compared: state them in metadata.jsonl or metadata.csv, a row "
            "with file_name and text for each file"
        )
    examples: list[Example] = []
    spoken: list[tuple[str, str]] = []
    done = found = 0
    while done < len(files) and (tokens is None or found < tokens):
        group = [next(cut_windows([file], speech)) for file in files[done : done + batch]]
        done += len(group)
        progress(done, len(files))
        windows = [window for window in group if speech.text_tokens(window.text or "")]
        if not windows:
            continue
        encoded = speech.encode(windows)
        said = [window.text or "" for window in windows]
        spoken += zip(said, speech.transcribe(encoded), strict=True)
        for text, sound, prompt in zip(
            said, encoded.cpu(), speech.prompts(encoded).numpy(), strict=True
        ):
            targets = np.array(speech.text_tokens(text))
            read = np.concatenate([prompt, targets[:-1]])
            blocks = np.full_like(targets, len(examples))
            examples.append(Example(read, targets, blocks, encoder={"encoder_outputs": sound}))
            found += len(targets)
    if not examples:
        raise DataError("all sounds are longer than the encoder's window: cut them into sentences")
    left_out = done - len(examples)
    note = (
        f"{left_out} sounds without words or longer than a window were left out"
        if left_out
        else None
    )
    # what papers on Whisper apply to texts before they count words; the spellings come with the checkpoint, if at all
    normal: Normal = BasicTextNormalizer()
    languages = getattr(speech.model.generation_config, "lang_to_id", None) or {}
    in_english = sum(languages.get("<|en|>") in example.read.tolist() for example in examples)
    if not languages or 2 * in_english >= len(examples):
        normal = EnglishTextNormalizer(
            getattr(speech.tokenizer, "english_spelling_normalizer", None) or {}
        )
    return Material(_longest_first(examples), len(examples), note, spoken, normal)


def encode(
    tokenizer: Any, text: str, argument: str = "text", **changed: bool
) -> tuple[Integers, Integers]:
    """A text's tokens, [n], and the UTF-8 bytes that each of them covers, [n], which add up to those of the text.

    If a tokenizer gives no offsets, its tokens are assumed to be equally long.

    Args:
        tokenizer: a transformers tokenizer.
        text: the text to encode.
        argument: of the tokenizer; `text_target` for a target of an encoder-decoder, which may have another language.
        changed: options of the tokenizer, which by default adds no special tokens, and reads the name of one as text.
    """
    fast = bool(tokenizer.is_fast)
    options = {
        "add_special_tokens": False,
        "split_special_tokens": True,
        "return_offsets_mapping": fast,
        "verbose": False,
    }
    found = tokenizer(**{argument: text}, **options | changed)
    ids = np.array(found["input_ids"], np.int64)
    if fast:
        ends = np.maximum.accumulate(
            np.array(found["offset_mapping"], np.int64).reshape(-1, 2)[:, 1]
        )
    else:
        ends = len(text) * np.arange(1, len(ids) + 1) // max(1, len(ids))
    ends[-1:] = len(text)
    until = np.cumsum([0, *map(len, map(str.encode, text))])[ends]
    return ids, np.diff(until, prepend=0)
