"""What a model is scored on: examples, each of which it reads in one forward pass, of text or of
sound.

Text and pairs are read once for all models; sound is encoded by each of them.

Shape legend: n scored tokens of all examples, b examples of a batch, L positions of a row.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gqa_convert.data.encoders import ChatEncoder, holds_conversations
from gqa_convert.data.files import FieldError, Fields, Files, Piece
from gqa_convert.data.model_tokenizer import beginning_of_text, decoder_start, starts_with_last
from gqa_convert.data.order import Integers, mix
from gqa_convert.data.pairs import shortened
from gqa_convert.data.sampler import IGNORED
from gqa_convert.data.sources import Source, open_source
from gqa_convert.data.span_corruption import SpanCorruption
from gqa_convert.data.speech import AudioFile, SpeechModel, cut_windows, list_audio_files
from gqa_convert.errors import DataError
from gqa_convert.measuring import StageProgress
from gqa_convert.runtime.paths import local_path

from .candidates import CAUSAL, SPANS, SPEECH, Candidate

BLOCK = 2048
"""The bytes in a block of text, the unit over which standard errors are computed."""
STREAM_TOKENS = 1_000_000
"""The default number of tokens, or of pairs, read from a Hub dataset; some datasets never end."""

Array = npt.NDArray[Any]
Doubles = npt.NDArray[np.float64]
Spoken = list[tuple[str, str]]
"""What was said in each sound, and what a model wrote."""
Spelling = Callable[[str], str]
"""Gives texts that say the same one spelling."""


# What is scored


class Example(NamedTuple):
    """A row of a batch.

    Attributes:
        inputs: arguments of the forward pass, among them the tokens that a decoder reads, and
            `labels`, as many, of which t are to be predicted and all others IGNORED. Of an encoder
            the tokens that it reads and their mask, or what it made of a sound.
        blocks: [t], the number of the block that each label belongs to, which is some kilobytes of
            a document; or one number, that of the example.
        sizes: [t], the UTF-8 bytes of text that each label covers; 0 if that is not defined.
    """

    inputs: Mapping[str, Any]
    blocks: Integers | int
    sizes: Integers | int = 0

    @property
    def targets(self) -> Integers:
        """[t], the tokens to predict."""
        labels = self.inputs["labels"]
        targets: Integers = labels[labels != IGNORED]
        return targets


class Material:
    """Everything that a model is scored on.

    Args:
        examples: with their n scored tokens.
        note: what was left out or cut, None for nothing.

    Attributes:
        examples: the longest first, so that memory runs out at the beginning if at all, and little
            padding is needed.
        blocks: the block of each scored token, [n].
        sizes: the bytes of text that each scored token covers, [n]; 0 if that is not defined.
        largest: the largest token.
    """

    def __init__(self, examples: Iterable[Example], note: str | None = None) -> None:
        self.examples = sorted(examples, key=_length, reverse=True)
        self.note = note
        columns = []
        self.largest = 0
        for each in self.examples:
            columns.append(np.broadcast_arrays(each.blocks, each.sizes, each.targets))
            read = each.inputs.get("decoder_input_ids", each.inputs.get("input_ids"))
            self.largest = max(self.largest, int(read.max()), int(each.targets.max()))
        self.blocks, self.sizes, _ = map(np.concatenate, zip(*columns, strict=True))

    def by_block(self, values: Array) -> Doubles:
        """Sums of the scored tokens' values in each block, in the order of the text: [blocks]."""
        return np.bincount(self.blocks, values).astype(np.float64)

    def batches(self, size: int, device: Any = "cpu") -> Iterator[tuple[dict[str, Any], Tensor]]:
        """Keyword arguments of a forward pass on so many examples, and the tokens [b, L] to
        predict, or IGNORED where nothing is scored. Rows are padded on the right: later tokens
        can't change a decoder's predictions.
        """
        for first in range(0, len(self.examples), size):
            examples = self.examples[first : first + size]
            inputs = {}
            for name in examples[0].inputs:
                rows = [torch.as_tensor(example.inputs[name]) for example in examples]
                padding = IGNORED if name == "labels" else 0
                inputs[name] = pad_sequence(rows, True, padding).to(device)
            labels = inputs.pop("labels")
            yield inputs, labels


def _length(example: Example) -> int:
    return len(example.inputs["labels"]) + len(example.inputs.get("input_ids", ()))


# Text


def read_text(
    data: Source,
    model: Candidate,
    objective: str,
    window: int,
    limit: int | None,
    progress: StageProgress,
) -> Material | list[AudioFile]:
    """What models are scored on: tokens, which are the same for all, or sounds.

    Args:
        data: where it is.
        model: any of the models.
        objective: of all models.
        window: the most tokens of a window, or of an encoder's input.
        limit: see `read_documents`.
        progress: see `read_documents`.

    Raises:
        DataError: the text can't be read, or is too short.
    """
    if objective == SPEECH:
        return list_audio_files(local_path(data.source), data.split)
    tokenizer, config = model.tokenizer, model.config
    documents = read_documents(data, tokenizer, limit, progress)
    if objective == CAUSAL:
        return text_material(documents, tokenizer, window)
    start = decoder_start(model.folder, config, tokenizer)
    if objective == SPANS:
        return span_material(documents, tokenizer, start, window)
    return pair_material(documents, None if starts_with_last(config) else start, window)


class Document(NamedTuple):
    """A text, a conversation or a pair in tokens.

    Attributes:
        ids: the tokens; of a pair, those that the decoder should write.
        sizes: the UTF-8 bytes that each of them covers.
        is_rendered: whether it is a conversation as a chat template writes it, which begins as that
            says.
        read: the tokens that the encoder reads; None where there is no pair.
    """

    ids: Integers
    sizes: Integers
    is_rendered: bool = False
    read: Any = None


def read_documents(
    source: Source, tokenizer: Any, limit: int | None, progress: StageProgress
) -> list[Document]:
    """The texts of a source, or pairs of texts if it states the fields of both, or conversations as
    the chat template writes them, up to a limit. Pairs have the special tokens of the tokenizer.

    Args:
        source: a file, a folder, a pattern, a Hub dataset or `python-stdlib`.
        tokenizer: of the models.
        limit: the most tokens of text, or pairs, to read; by default all of a file, and 1M of a Hub
            dataset.
        progress: called with what was read of the limit, or else of the bytes of the files.

    Raises:
        DataError: the text can't be found or read, or is empty; or rows lack a field, or have no
            text in it.
    """
    text = open_source(source)
    if limit is None and not isinstance(text, Files):
        limit = STREAM_TOKENS
    chats = None
    fields = Fields((source.text_field,))
    if source.source_field and source.target_field:
        fields = Fields((source.source_field, source.target_field), "pair")
    elif holds_conversations(source, text):
        chats = ChatEncoder(tokenizer)
        fields = chats.fields
    found = []
    parts: list[tuple[Integers, Integers]] = []
    done = 0
    try:
        for piece in text.pieces(fields):
            if fields.holds == "pair":
                found.append(_encode_pair(tokenizer, piece, fields))
                done += 1
            else:
                if chats:
                    piece = chats.rendered(piece)
                split = not piece.is_rendered
                ids, sizes = encode(tokenizer, piece.text, split_special_tokens=split)
                if limit is not None:
                    ids, sizes = ids[: limit - done], sizes[: limit - done]
                done += len(ids)
                parts.append((ids, sizes))
                if piece.last or done == limit:
                    ids, sizes = map(np.concatenate, zip(*parts, strict=True))
                    found.append(Document(ids, sizes, piece.is_rendered))
                    parts = []
            if limit is not None:
                progress(done, limit)
            elif isinstance(text, Files):
                progress(text.bytes_read, text.total_bytes)
            if done == limit:
                break
    except FieldError as problem:
        options = "--source-field and --target-field" if fields.holds == "pair" else "--text-field"
        raise DataError(f"{problem}, or name another with {options}") from None
    if not found:
        raise DataError(f"{text.label} holds no text: name another source or --text-field")
    return found


def _encode_pair(tokenizer: Any, piece: Piece, fields: Fields) -> Document:
    for field, side in zip(fields.names, piece.text, strict=True):
        if not side:
            raise DataError(
                f"{piece.where}: {field!r} is empty, expected text: remove the row, or name "
                "another field"
            )
    source, target = piece.text
    read = tokenizer(source, split_special_tokens=True, verbose=False)["input_ids"]
    ids, sizes = encode(tokenizer, target, "text_target", add_special_tokens=True)
    return Document(ids, sizes, read=np.array(read, np.int64))


def text_material(documents: Iterable[Document], tokenizer: Any, window: int) -> Material:
    """A text for a causal model. Each token of a document is predicted once, except the first: from
    the beginning of its window, or from the beginning-of-text token, if the tokenizer has one. A
    window begins with it where the tokenizer begins every text so. A conversation begins as its
    chat template writes it.

    Args:
        documents: the text.
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
    for ids, sizes, is_rendered, _ in documents:
        if not is_rendered:
            ids = np.concatenate([begin, ids])
            sizes = np.pad(sizes, (len(begin), 0))
        blocks = first_block + np.maximum(sizes.cumsum() - 1, 0) // BLOCK
        first_block += -(-int(sizes.sum()) // BLOCK)
        for start in range(0, len(ids) - 1, step):
            scored = slice(start + 1, start + 1 + step)
            before = again if start else again[:0]
            inputs = {
                "input_ids": np.concatenate([before, ids[start:-1][:step]]),
                "labels": np.concatenate([np.full_like(before, IGNORED), ids[scored]]),
            }
            examples.append(Example(inputs, blocks[scored], sizes[scored]))
    if not examples:
        raise DataError(
            "the text has no token with a preceding one to be predicted from: name more text"
        )
    return Material(examples)


def span_material(
    documents: Iterable[Document], tokenizer: Any, start: int, length: int
) -> Material:
    """A text with 15% of its tokens removed in spans of three, as in T5's pretraining; the spans
    and their sentinels are scored. A remainder at the end of the text is not used.

    Args:
        documents: the text.
        tokenizer: of a T5 model.
        start: the first token of the decoder's input.
        length: tokens of the encoder's input.

    Raises:
        DataError: no span fits the length, the tokenizer has too few sentinels, or the text is
            shorter than one example.
    """
    try:
        corruption = SpanCorruption(tokenizer, start, length)
    except DataError as problem:  # in the words of a recipe
        raise DataError(str(problem).replace("sequence_length", "--window")) from None
    ids = np.concatenate([document.ids for document in documents])
    raw = corruption.raw
    count = len(ids) // raw
    if not count:
        raise DataError(
            f"the text comes to {len(ids)} tokens, and an example of span corruption with {length} "
            f"encoder tokens takes {raw}: name more text, or lower --window"
        )
    keys = [(mix(0), number) for number in range(count)]
    made = corruption.batch(ids[: count * raw].reshape(count, raw), keys)
    rows = [dict(zip(made, row, strict=True)) for row in zip(*made.values(), strict=True)]
    return Material(map(Example, rows, range(count)))


def pair_material(documents: Iterable[Document], start: int | None, length: int) -> Material:
    """Pairs of what the encoder reads and what the decoder should write, of which special tokens
    are scored too.

    Args:
        documents: the pairs.
        start: the first token of the decoder's input; None for the target's last token, with which
            mBART's begins.
        length: maximum number of tokens of each; a longer text is cut before its last one,
            end-of-text.
    """
    examples = []
    truncated = 0
    for number, (ids, sizes, _, source) in enumerate(documents):
        truncated += max(len(source), len(ids)) > length
        read = shortened(source, length)
        targets = shortened(ids, length)
        decoder = np.roll(targets, 1)
        if start is not None:
            decoder[0] = start
        inputs = {
            "input_ids": read,
            "attention_mask": np.ones_like(read),
            "decoder_input_ids": decoder,
            "labels": targets,
        }
        examples.append(Example(inputs, number, shortened(sizes, length)))
    note = f"{truncated} pairs were cut to the window" if truncated else None
    return Material(examples, note)


def encode(
    tokenizer: Any, text: str, argument: str = "text", **changed: bool
) -> tuple[Integers, Integers]:
    """A text's tokens, [n], and the UTF-8 bytes that each of them covers, [n], which add up to
    those of the text.

    If a tokenizer gives no offsets, its tokens are assumed to be equally long.

    Args:
        tokenizer: a transformers tokenizer.
        text: the text to encode.
        argument: of the tokenizer; `text_target` for a target of an encoder-decoder, which may have
            another language.
        changed: options of the tokenizer, which by default adds no special tokens, and reads the
            name of one as text.
    """
    fast = bool(tokenizer.is_fast)
    options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    found = tokenizer(**{argument: text}, return_offsets_mapping=fast, **options | changed)
    ids = np.array(found["input_ids"], np.int64)
    ends = len(text) * np.arange(1, len(ids) + 1) // max(1, len(ids))
    if fast:
        offsets = np.array(found["offset_mapping"], np.int64).reshape(-1, 2)
        ends = np.maximum.accumulate(offsets[:, 1])
    ends[-1:] = len(text)
    bytes_before = np.cumsum([0, *map(len, map(str.encode, text))])
    return ids, np.diff(bytes_before[ends], prepend=0)


# Sound


def speech_material(
    speech: SpeechModel,
    files: Sequence[AudioFile],
    batch: int,
    limit: int | None,
    progress: StageProgress,
) -> tuple[Material, Spoken]:
    """Sounds with their texts, on which the encoder runs once. Those without words and those longer
    than the encoder's window are left out, and counted.

    Args:
        speech: the model, which hears the language of each sound too.
        files: with their texts.
        batch: sounds at a time.
        limit: after how many tokens to stop; None for all files.
        progress: called with the number of files that are done, and of all.

    Returns:
        What is scored, and what was said.

    Raises:
        DataError: a file has no text or can't be read, or all are too long.
    """
    if any(file.text is None for file in files):
        raise DataError(
            "the folder has no texts, with which models are compared: state them in metadata.jsonl "
            "or metadata.csv, a row with file_name and text for each file"
        )
    examples: list[Example] = []
    spoken: Spoken = []
    done = found = 0
    while done < len(files) and (limit is None or found < limit):
        group = [next(cut_windows([file], speech)) for file in files[done : done + batch]]
        done += len(group)
        progress(done, len(files))
        windows = [window for window in group if speech.text_tokens(window.text)]
        if not windows:
            continue
        encoded = speech.encode(windows)
        heard = speech.transcribe(encoded)
        prompts = speech.prompts(encoded).numpy()
        rows = zip(windows, heard, encoded.cpu(), prompts, strict=True)
        for (_, text), written, sound, prompt in rows:
            targets = np.array(speech.text_tokens(text))
            inputs = {
                "encoder_outputs": sound,
                "decoder_input_ids": np.concatenate([prompt, targets[:-1]]),
                "labels": np.pad(targets, (len(prompt) - 1, 0), constant_values=IGNORED),
            }
            examples.append(Example(inputs, len(examples)))
            spoken.append((str(text), written))
            found += len(targets)
    if not examples:
        raise DataError("all sounds are longer than the encoder's window: cut them into sentences")
    note = None
    if left_out := done - len(examples):
        note = f"{left_out} sounds without words or longer than a window were left out"
    return Material(examples, note), spoken


def spelling(speech: SpeechModel, material: Material) -> Spelling:
    """What papers on Whisper apply before they count words.

    Args:
        speech: a model. The spellings of English come with its checkpoint, if at all.
        material: what it heard, in the languages that the prompts state.
    """
    from transformers.models.whisper.english_normalizer import (
        BasicTextNormalizer,
        EnglishTextNormalizer,
    )

    languages = getattr(speech.model.generation_config, "lang_to_id", None) or {}
    english = languages.get("<|en|>")
    heard = sum(english in example.inputs["decoder_input_ids"] for example in material.examples)
    normal: Spelling = BasicTextNormalizer()
    if not languages or 2 * heard >= len(material.examples):
        spellings = getattr(speech.tokenizer, "english_spelling_normalizer", None) or {}
        normal = EnglishTextNormalizer(spellings)
    return normal
