"""What a model is scored on: examples, each of which it reads in one forward pass, of text or of sound.

Shape legend: n scored tokens of all examples, b examples of a batch, L positions of a row, r scored predictions of a batch.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gqa_convert.data.audio_files import AudioFile
from gqa_convert.data.documents import Piece, TextField
from gqa_convert.data.order import mix
from gqa_convert.data.pairs import frame_around, shortened
from gqa_convert.data.span_corruption import SpanCorruption
from gqa_convert.data.speech import Keeper, SpeechModel, cut_windows
from gqa_convert.data.token_files import batched, ids_of
from gqa_convert.data.tokenizing import TextEncoder
from gqa_convert.errors import DataError

BLOCK = 2048
"""The bytes in a block of text, the unit over which standard errors are computed."""

Integers = npt.NDArray[np.int64]
Progress = Callable[[int, int], None]


class Example(NamedTuple):
    """The input of a row.

    Attributes:
        read: the tokens that a decoder reads.
        targets: the tokens that its last predictions are to be, as many as are scored.
        source: the tokens that an encoder reads.
        encoded: what an encoder made of a sound, [positions, hidden_size].
    """

    read: Integers
    targets: Integers
    source: Integers | None = None
    encoded: Tensor | None = None


class Batch(NamedTuple):
    """The input of one forward pass.

    Attributes:
        inputs: keyword arguments of the forward pass, [b, ...].
        rows: [r], indices of the b * L predictions that are scored, example by example.
        targets: [r], the tokens to predict there.
        places: [r], the positions of these tokens among all n.
    """

    inputs: dict[str, Tensor]
    rows: Tensor
    targets: Tensor
    places: Integers


@dataclass(frozen=True)
class Material:
    """Everything that a model is scored on.

    Attributes:
        examples: in the order of the text.
        blocks: [n], the number of the block that each scored token belongs to: some kilobytes of a document, or an example.
        block_count: the number of blocks, which are the same for every tokenizer.
        sizes: [n], the UTF-8 bytes of text that each scored token covers; None if that is not defined.
        note: what was left out or cut, None for nothing.
        heard: what a model that hears wrote for each example; None for text.
        said: what was said in each.
    """

    examples: Sequence[Example]
    blocks: Integers
    block_count: int
    sizes: Integers | None = None
    note: str | None = None
    heard: Sequence[str] | None = None
    said: Sequence[str] = ()

    @property
    def tokens(self) -> int:
        """The number of scored tokens."""
        return len(self.blocks)

    @property
    def largest(self) -> int:
        """The largest token."""
        return max(int(part.max()) for example in self.examples for part in (example.read, example.targets))

    @property
    def byte_count(self) -> int | None:
        """The bytes of text that the scored tokens cover."""
        return None if self.sizes is None else int(self.sizes.sum())

    @cached_property
    def fingerprint(self) -> str:
        """A hash of what is predicted and of what encoders read; equal ones allow a comparison token by token."""
        digest = hashlib.sha256()
        for example in self.examples:
            for part in (example.targets, example.source):
                ids = np.empty(0, np.int64) if part is None else np.asarray(part, np.int64)
                digest.update(len(ids).to_bytes(8, "little") + ids.tobytes())
        return digest.hexdigest()

    @cached_property
    def _bounds(self) -> Integers:
        return np.cumsum([0, *(len(example.targets) for example in self.examples)])

    def by_block(self, values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Sums of the scored tokens' values in each block, in the order of the text: [block_count]."""
        return np.bincount(self.blocks, values, self.block_count).astype(np.float64)

    def with_short_context(self, context: int) -> "Material":
        """The same scored tokens, each read behind at most 2 * `context` tokens, and more than `context` where there are."""
        cut = []
        for example in self.examples:
            for first in range(0, len(example.read), context):
                read = example.read[max(0, first - context) : first + context]
                cut.append(Example(read, example.targets[first : first + context]))
        return Material(cut, self.blocks, self.block_count)

    def order(self, batch: int) -> list[list[int]]:
        """The numbers of the examples in batches, the longest first: memory runs out at the beginning if at all, and
        little padding is needed.
        """
        lengths = [
            len(example.read) + len(() if example.source is None else example.source) for example in self.examples
        ]
        order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
        return [order[first : first + batch] for first in range(0, len(order), batch)]

    def batch(self, numbers: Sequence[int]) -> Batch:
        """A batch of examples, padded on the right: later tokens can't change a decoder's predictions."""
        chosen = [self.examples[number] for number in numbers]
        read = _padded([example.read for example in chosen])
        inputs = {"decoder_input_ids": read}
        if chosen[0].encoded is not None:
            inputs["encoder_outputs"] = torch.stack([example.encoded for example in chosen])
        elif chosen[0].source is not None:
            sources = [example.source for example in chosen if example.source is not None]
            inputs["input_ids"] = _padded(sources)
            if len({len(source) for source in sources}) > 1:
                inputs["attention_mask"] = _padded([np.ones_like(source) for source in sources])
        else:
            inputs = {"input_ids": read}
        ends = [len(example.read) + row * read.shape[1] for row, example in enumerate(chosen)]
        rows = [np.arange(end - len(example.targets), end) for end, example in zip(ends, chosen, strict=True)]
        places = [np.arange(*self._bounds[number : number + 2]) for number in numbers]
        targets = np.concatenate([example.targets for example in chosen])
        return Batch(inputs, torch.from_numpy(np.concatenate(rows)), torch.from_numpy(targets), np.concatenate(places))


def _padded(rows: Sequence[Any]) -> Tensor:
    """Rows [b, L], followed by zeros."""
    tensors = [torch.from_numpy(np.asarray(row, np.int64)) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)


def text_material(
    pieces: Sequence[Piece], tokenizer: Any, *, window: int, progress: Progress = lambda done, total: None
) -> Material:
    """A text for a causal model. Each token of a document is predicted once, except the first: from the beginning of its
    window, or from the beginning-of-text token, if the tokenizer has one.

    Args:
        pieces: documents or parts of them, in order.
        tokenizer: the model's.
        window: the most tokens that the model reads at once.
        progress: called with the pieces tokenised, and their number.

    Raises:
        DataError: the text has no token to predict.
    """
    begin = [] if tokenizer.bos_token_id is None else [int(tokenizer.bos_token_id)]
    examples: list[Example] = []
    sizes, blocks = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    first_block = 0
    parts, ends, nbytes = [np.array(begin, np.int64)], [np.zeros(len(begin), np.int64)], 0
    for number, piece in enumerate(pieces):
        text = str(piece.text)
        tokens, characters = encode(tokenizer, text)
        parts.append(tokens)
        ends.append(byte_ends(text, characters) + nbytes)
        nbytes += len(text.encode())
        progress(number + 1, len(pieces))
        if not (piece.last or number == len(pieces) - 1):
            continue
        ids, until = np.concatenate(parts), np.concatenate(ends)
        for start in range(0, len(ids) - 1, window):
            targets = ids[start + 1 : start + 1 + window]
            examples.append(Example(ids[start : start + len(targets)], targets))
        sizes.append(np.diff(until, prepend=0)[1:])
        blocks.append(first_block + np.maximum(until - 1, 0)[1:] // BLOCK)
        first_block += -(-nbytes // BLOCK)
        parts, ends, nbytes = parts[:1], ends[:1], 0
    if not examples:
        raise DataError("the text has no token with a preceding one to be predicted from: name more text")
    return Material(examples, np.concatenate(blocks), first_block, np.concatenate(sizes))


def span_material(pieces: Sequence[Piece], tokenizer: Any, *, start: int, length: int, seed: int) -> Material:
    """A text with 15% of its tokens removed in spans of three, as in T5's pretraining; the spans and their sentinels
    are scored.

    Args:
        pieces: documents or parts of them, in order.
        tokenizer: of a T5 model.
        start: the first token of the decoder's input.
        length: tokens of the encoder's input.
        seed: of the choice of spans.

    Raises:
        DataError: no span fits the length, the tokenizer has too few sentinels, or the text is shorter than one
            example. A remainder at the end of the text is not used.
    """
    try:
        corruption = SpanCorruption(tokenizer, start)
        raw = corruption.shape_for(length).raw
    except DataError as problem:  # in the words of a recipe
        raise DataError(str(problem).replace("sequence_length", "--window")) from None
    encoder = TextEncoder(tokenizer, TextField(), closed=False)
    ids = np.concatenate([ids_of(encoder.encode(some)) for some in batched(pieces)])
    count = len(ids) // raw
    if not count:
        raise DataError(
            f"the text comes to {len(ids)} tokens, and an example of span corruption with {length} encoder tokens takes "
            f"{raw}: name more text, or lower --window"
        )
    keys = [(mix(seed), number) for number in range(count)]
    made = corruption.batch(ids[: count * raw].reshape(count, raw), keys)
    parts = zip(made["decoder_input_ids"], made["labels"], made["input_ids"], strict=True)
    return _of_examples([Example(*part) for part in parts])


def pair_material(
    pairs: Sequence[tuple[str, str]],
    tokenizer: Any,
    *,
    start: int | None,
    length: int,
    progress: Progress = lambda done, total: None,
) -> Material:
    """Pairs of a source and a target, each with the special tokens of the tokenizer, which are scored too.

    Args:
        pairs: sources and targets.
        tokenizer: the model's.
        start: the first token of the decoder's input; None for the target's last token, with which mBART's begins.
        length: maximum number of tokens of each; a longer text is cut before its closing special tokens.
        progress: called with the number of pairs that were tokenised and the number of all pairs.
    """
    closing, target_closing = (len(frame_around(tokenizer, argument).after) for argument in ("text", "text_target"))
    examples, sizes, truncated = [], [], 0
    for number, (source, target) in enumerate(pairs):
        read, _ = encode(tokenizer, source, special=True)
        written, ends = encode(tokenizer, target, special=True, target=True)
        truncated += len(read) > length or len(written) > length
        targets = shortened(written, length, target_closing)
        begin = int(targets[-1]) if start is None else start
        decoder = np.concatenate([[begin], targets[:-1]])
        examples.append(Example(decoder, targets, shortened(read, length, closing)))
        sizes.append(shortened(np.diff(byte_ends(target, ends), prepend=0), length, target_closing))
        progress(number + 1, len(pairs))
    note = f"{truncated} pairs were cut to the window" if truncated else None
    return _of_examples(examples, np.concatenate(sizes), note)


def speech_material(
    speech: SpeechModel, files: Sequence[AudioFile], *, batch: int, tokens: int | None, progress: Progress
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
    if any(file.text is None for file in files):
        raise DataError(
            "the folder has no texts, with which models are compared: state them in metadata.jsonl, a line with file_name "
            "and text for each file"
        )
    examples: list[Example] = []
    written: list[str] = []
    said: list[str] = []
    done = found = 0
    keeper = Keeper()
    while done < len(files) and (tokens is None or found < tokens):
        group = [next(cut_windows([file], speech)) for file in files[done : done + batch]]
        done = min(len(files), done + batch)
        windows = [window for window in group if speech.text_tokens(window.text or "")]
        if windows:
            encoded = speech.encode(windows)
            written += speech.transcribe(encoded)
            kept, prompts = keeper.keep(encoded.cpu()), speech.prompts(encoded).numpy()
            for window, sound, prompt in zip(windows, kept, prompts, strict=True):
                said.append(window.text or "")
                targets = np.array(speech.text_tokens(said[-1]))
                examples.append(Example(np.concatenate([prompt, targets[:-1]]), targets, encoded=sound))
                found += len(targets)
        progress(done, len(files))
    if not examples:
        raise DataError("all sounds are longer than the encoder's window: cut them into sentences")
    left_out = done - len(examples)
    note = f"{left_out} sounds without words or longer than a window were left out" if left_out else None
    return _of_examples(examples, note=note, heard=written, said=said)


def _of_examples(
    examples: Sequence[Example], sizes: Integers | None = None, note: str | None = None, **heard: Any
) -> Material:
    """Material in which each example is a block."""
    lengths = [len(example.targets) for example in examples]
    return Material(examples, np.repeat(np.arange(len(examples)), lengths), len(examples), sizes, note, **heard)


def encode(tokenizer: Any, text: str, *, special: bool = False, target: bool = False) -> tuple[Integers, Integers]:
    """A text's tokens, and the character position at which each of them ends.

    If a tokenizer gives no offsets, its tokens are assumed to be equally long.

    Args:
        tokenizer: a transformers tokenizer.
        text: the text to encode.
        special: add the tokenizer's special tokens.
        target: encode it as a target of an encoder-decoder, which may have another language.

    Returns:
        [n] and [n]; the last end is the length of the text.
    """
    fast = bool(tokenizer.is_fast)
    given = {"text_target" if target else "text": text}
    found = tokenizer(**given, add_special_tokens=special, return_offsets_mapping=fast, verbose=False)
    ids = np.array(found["input_ids"], np.int64)
    if fast:
        ends = np.maximum.accumulate(np.array(found["offset_mapping"], np.int64).reshape(-1, 2)[:, 1])
    else:
        ends = len(text) * np.arange(1, len(ids) + 1) // max(1, len(ids))
    ends[-1:] = len(text)
    return ids, ends


def byte_ends(text: str, ends: Integers) -> Integers:
    """Convert character positions to UTF-8 byte positions."""
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    widths = 1 + (points >= 1 << 7).astype(np.int64) + (points >= 1 << 11) + (points >= 1 << 16)
    return np.concatenate([[0], np.cumsum(widths)])[ends]
