"""Text that a checkpoint writes itself (`self` as a source), generated once into the cache and then read like any other.

Liu et al. 2023 (LLM-QAT) distil on such text where that of the pretraining is not at hand. Each text begins with the
token that begins documents and is sampled from the model's own distribution. Conversations begin as the chat template
begins a user's message, so that the model asks itself, and then answers (Xu et al. 2024, Magpie, section 2).
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final

from gqa_convert.checkpoint.atomic_files import atomic_file
from gqa_convert.checkpoint.devices import chosen_device
from gqa_convert.checkpoint.locks import try_lock
from gqa_convert.checkpoint.paths import local_path
from gqa_convert.checkpoint.resource_errors import is_disk_full, is_out_of_memory, no_space
from gqa_convert.checkpoint.source import Checkpoint, open_checkpoint
from gqa_convert.data.model_tokenizer import check_vocabulary
from gqa_convert.data.order import mix
from gqa_convert.data.token_files import OnTokenize
from gqa_convert.errors import (
    DataError,
    DeviceMemoryError,
    InterruptedRunError,
    OptionError,
    OutputError,
    StoppedError,
)
from gqa_convert.families import loading
from gqa_convert.families.context_length import stated_positions

GENERATING: Final = "generating text"
"""The label of progress."""
LENGTH: Final = 512
"""The most tokens of one text."""
QUESTION: Final = 96
"""The most tokens of a question in a conversation."""
BATCH: Final = 32
"""The texts that are generated at once."""
_MARKS: Final = ("<<question>>", "<<answer>>")
"""Stand for messages while a chat template is taken apart."""
_NEEDS_HEAD: Final = "text is sampled from its predictions; name the language model that the checkpoint was made from"


@dataclass(frozen=True, slots=True)
class OwnText:
    """Text of a checkpoint's own.

    Attributes:
        file: JSON lines in the cache, with `text`, or for conversations with `messages`.
        label: what it is, for records.
    """

    file: Path
    label: str

    def texts(self) -> list[str]:
        """The documents in the file."""
        return [json.loads(line)["text"] for line in self.file.read_text("utf-8").splitlines()]


def own_text(
    model: str | Path,
    cache: Path,
    *,
    tokens: int,
    seed: int = 0,
    temperature: float = 1.0,
    device: str | None = None,
    conversations: bool = False,
    progress: OnTokenize = lambda label, done, total: None,
) -> OwnText:
    """The text that a checkpoint writes, generated unless the cache has it; a call that was stopped is continued.

    The file is found again by the checkpoint's files, the number of tokens, the seed and the temperature.

    Args:
        model: the checkpoint, a folder or a Hub id.
        cache: the folder of the file.
        tokens: to generate at least; the last batch is completed.
        seed: of the sampling.
        temperature: of the sampling, above 0.
        device: such as `cpu` or `cuda:1`; None for a GPU if there is one.
        conversations: of one question and one answer, in place of documents.
        progress: called with a label, the tokens that are generated and their number.

    Raises:
        OptionError: the model is an encoder-decoder, or a number is out of range.
        DataError: the tokenizer has no token to begin with, or no chat template.
        OutputError: the file can't be written.
        StoppedError: a signal asked to stop; finished batches are kept.
    """
    if tokens < 1:
        raise OptionError(f"tokens is {tokens}: it must be at least 1")
    checkpoint = open_checkpoint(str(model), download=True)
    settings = {"length": LENGTH, "batch": BATCH, "temperature": temperature, "seed": seed, "tokens": tokens}
    if conversations:
        settings["conversations"] = True
    key = json.dumps([_files_of(checkpoint), settings], sort_keys=True)
    file = cache / f"own-text-{hashlib.sha256(key.encode()).hexdigest()[:32]}.jsonl"
    name = local_path(checkpoint.source_id).name if checkpoint.folder else checkpoint.source_id
    kind = "conversations" if conversations else "text"
    label = f"{name}'s own {kind} (at least {tokens:,} tokens at temperature {temperature:g}, seed {seed})"
    if not file.is_file():
        with _explained(file):
            cache.mkdir(parents=True, exist_ok=True)
        write = partial(
            _Conversations if conversations else _Writer, checkpoint, chosen_device(device), seed, temperature
        )
        _write(checkpoint, file, tokens, write, progress)
    return OwnText(file, label)


def _files_of(checkpoint: Checkpoint) -> list[Any]:
    """What tells a checkpoint from others."""
    assert checkpoint.folder is not None
    files = [path for path in sorted(checkpoint.folder.iterdir()) if path.is_file()]
    return [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in files]


def _write(
    checkpoint: Checkpoint,
    file: Path,
    tokens: int,
    open_writer: "Callable[[], _Writer]",
    progress: OnTokenize,
) -> None:
    """Generate the file. Batch b is a function of the settings and b alone, so that a run that was interrupted continues
    after its last finished batch and ends with the same file.
    """
    name = checkpoint.source_id
    if loading.is_encoder_decoder(checkpoint.config):
        raise OptionError(f"{name} is an encoder-decoder, and only decoders write text: name text for it instead")
    loading.check_language_model(name, checkpoint.config, _NEEDS_HEAD)
    with _unfinished(file) as (kept, batches):
        done = sum(batch["tokens"] for batch in batches)
        try:
            with loading.explained(name), loading.no_bars():
                writer = open_writer()
            while done < tokens:
                batches.append(writer.batch(len(batches)))
                with _explained(file):
                    kept.write((json.dumps(batches[-1], ensure_ascii=False) + "\n").encode())
                    kept.flush()
                    os.fsync(kept.fileno())
                done += batches[-1]["tokens"]
                progress(GENERATING, min(done, tokens), tokens)
        except InterruptedRunError as stopped:
            reason = str(stopped).split(":")[0]
            raise StoppedError(
                f"{reason} after {done} tokens, which are kept: run the same command again to resume"
            ) from None
        except Exception as problem:
            if is_out_of_memory(problem):
                raise DeviceMemoryError(
                    f"out of memory while {name} wrote text of its own: name text instead"
                ) from None
            raise
        with _explained(file), atomic_file(file) as out:
            rows = (row for batch in batches for row in batch["rows"])
            out.writelines((json.dumps(row, ensure_ascii=False) + "\n").encode() for row in rows)
        _unfinished_path(file).unlink(missing_ok=True)


def _unfinished_path(file: Path) -> Path:
    return file.with_name(f".{file.name}.unfinished")


@contextmanager
def _unfinished(file: Path) -> Iterator[tuple[BinaryIO, list[dict[str, Any]]]]:
    """The hidden file with a line for each finished batch, to which this run appends, and the batches in it. A line that
    a kill tore is dropped.

    Raises:
        OutputError: another run writes it.
    """
    path = _unfinished_path(file)
    with _explained(file):
        lock = try_lock(path)
    if lock is None:
        raise OutputError(f"another run is writing {file}: wait for it")
    with os.fdopen(lock, "r+b") as kept:
        kept.seek(0)
        lines = kept.read().split(b"\n")[:-1]
        kept.seek(sum(len(line) + 1 for line in lines))
        kept.truncate()
        try:
            yield kept, [json.loads(line) for line in lines]
        finally:
            if not os.fstat(kept.fileno()).st_size:
                path.unlink(missing_ok=True)


@contextmanager
def _explained(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        if is_disk_full(problem):
            raise no_space(file, "continues after the last batch") from None
        raise OutputError(f"{file} can't be written ({problem.strerror or problem})") from None


class _Writer:
    """A model with its tokenizer, which writes batches of texts."""

    def __init__(self, checkpoint: Checkpoint, device: str, seed: int, temperature: float) -> None:
        import torch
        from transformers import GenerationConfig

        assert checkpoint.folder is not None
        self._seed, tokenizer = seed, loading.load_tokenizer(checkpoint.folder)
        begin = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        if begin is None:
            raise DataError("the tokenizer has no token that begins a document: name text instead")
        pad = tokenizer.pad_token_id
        check_vocabulary(checkpoint.config, max(begin, pad or 0), checkpoint.folder)
        halves = loading.multiplies_bfloat16(torch.device(device))
        model, _ = loading.load_model(checkpoint.folder, "auto" if halves else torch.float32)
        if halves and model.dtype == torch.float16:
            model = model.to(torch.bfloat16)
        self._tokenizer, self._model = tokenizer, model.to(device).eval()
        self._begin = int(begin)
        stated = getattr(model.generation_config, "eos_token_id", None) or tokenizer.eos_token_id
        self._ends = {end for end in (stated if isinstance(stated, list) else [stated]) if end is not None}
        self._context = stated_positions(checkpoint.config)
        # a model's own settings, such as a repetition penalty, would change its distribution
        self._model.generation_config = GenerationConfig(
            eos_token_id=sorted(self._ends) or None,
            pad_token_id=min(self._ends, default=0) if pad is None else pad,
            do_sample=True,
            temperature=temperature,
            top_k=0,
        )

    def batch(self, number: int) -> dict[str, Any]:
        """The texts of a batch that hold any, and the tokens generated for all."""
        rows = self._sampled([[self._begin]] * BATCH, mix(self._seed, number), LENGTH)
        texts = [self._tokenizer.decode(row, skip_special_tokens=True) for row in rows]
        return {"rows": [{"text": text} for text in texts if text.strip()], "tokens": sum(map(len, rows))}

    def _sampled(self, beginnings: Sequence[Sequence[int]], seed: int, most: int) -> list[list[int]]:
        """The tokens that the model writes behind each beginning, at most so many and as its context allows, up to the first
        end-of-text, which is included.
        """
        import torch

        torch.manual_seed(seed)
        width = max(map(len, beginnings))
        if self._context is not None:
            most = min(most, self._context - width)
        if most < 1:
            raise DataError(f"a conversation does not fit the model's {self._context} positions: name text instead")
        padding = [width - len(beginning) for beginning in beginnings]
        pad = self._model.generation_config.pad_token_id
        ids = torch.tensor([[pad] * left + [*each] for left, each in zip(padding, beginnings, strict=True)])
        mask = torch.tensor([[0] * left + [1] * (width - left) for left in padding])
        device = self._model.device
        with torch.inference_mode():
            made = self._model.generate(input_ids=ids.to(device), attention_mask=mask.to(device), max_new_tokens=most)
        return [self._until_end(row) for row in made[:, width:].tolist()]

    def _until_end(self, tokens: list[int]) -> list[int]:
        end = next((at + 1 for at, token in enumerate(tokens) if token in self._ends), len(tokens))
        return tokens[:end]


class _Conversations(_Writer):
    """Writes conversations of a question and an answer."""

    def __init__(self, checkpoint: Checkpoint, device: str, seed: int, temperature: float) -> None:
        super().__init__(checkpoint, device, seed, temperature)
        turns = _chat_turns(self._tokenizer)
        if turns is None:
            raise DataError("the tokenizer has no chat template: name text instead")
        self._opening, self._between = turns

    def batch(self, number: int) -> dict[str, Any]:
        """The conversations of a batch that are complete enough to have a question, and the tokens generated for all."""
        seed = mix(self._seed, number)
        asked = self._sampled([self._opening] * BATCH, seed, QUESTION)
        questions = [self._tokenizer.decode(row, skip_special_tokens=True).strip() for row in asked]
        questions = [question for question in questions if question]
        if not questions:
            raise DataError("the model asks nothing where its chat template lets a user speak: name text instead")
        beginnings = [[*self._opening, *self._encode(question), *self._between] for question in questions]
        answers = self._sampled(beginnings, mix(seed, 1), LENGTH)
        rows = []
        for question, answer in zip(questions, answers, strict=True):
            answered = self._tokenizer.decode(answer, skip_special_tokens=True)
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answered}]
            rows.append({"messages": messages})
        return {"rows": rows, "tokens": sum(map(len, asked)) + sum(map(len, answers))}

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def has_chat_template(tokenizer: Any) -> bool:
    """Whether conversations can begin with a user's message."""
    return _chat_turns(tokenizer) is not None


def _chat_turns(tokenizer: Any) -> tuple[list[int], list[int]] | None:
    """The tokens before a user's first message, and those between it and the answer; None without a template for that."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    messages = [{"role": "user", "content": _MARKS[0]}, {"role": "assistant", "content": _MARKS[1]}]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception:  # a template may refuse anything in its own words
        return None
    opening, first, rest = text.partition(_MARKS[0])
    between, second, _ = rest.partition(_MARKS[1])
    if not (first and second and opening):
        return None
    before, after = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (opening, between))
    return before, after
