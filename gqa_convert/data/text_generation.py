"""Text that a checkpoint writes itself (`self` as a source), generated once into the cache and then read like any other.

Liu et al. 2023 (LLM-QAT) distil on such text where that of the pretraining is not at hand. Each text begins with the
token that begins documents and is sampled from the model's own distribution.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from gqa_convert.checkpoint.atomic_files import atomic_file
from gqa_convert.checkpoint.devices import chosen_device
from gqa_convert.checkpoint.locks import try_lock
from gqa_convert.checkpoint.paths import local_path
from gqa_convert.checkpoint.resource_errors import is_disk_full, is_out_of_memory, no_space
from gqa_convert.checkpoint.source import Checkpoint, open_checkpoint
from gqa_convert.data.order import mix
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
BATCH: Final = 16
"""The texts that are generated at once."""
_NEEDS_HEAD: Final = "text is sampled from its predictions; name the language model that the checkpoint was made from"

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class OwnText:
    """Text of a checkpoint's own.

    Attributes:
        file: JSON lines in the cache, with `text`.
        label: what it is, for records.
    """

    file: Path
    label: str


def own_text(
    model: str | Path,
    cache: Path,
    *,
    tokens: int,
    seed: int = 0,
    temperature: float = 1.0,
    device: str | None = None,
    progress: Progress = lambda label, done, total: None,
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
        progress: called with a label, the tokens that are generated and their number.

    Raises:
        OptionError: the model is an encoder-decoder, or a number is out of range.
        DataError: the tokenizer has no token to begin with.
        OutputError: the file can't be written.
        StoppedError: a signal asked to stop; finished batches are kept.
    """
    if tokens < 1:
        raise OptionError(f"tokens is {tokens}: it must be at least 1")
    checkpoint = open_checkpoint(str(model), download=True)
    settings = {"length": LENGTH, "batch": BATCH, "temperature": temperature, "seed": seed, "tokens": tokens}
    key = json.dumps([_files_of(checkpoint), settings], sort_keys=True)
    file = cache / f"own-text-{hashlib.sha256(key.encode()).hexdigest()[:32]}.jsonl"
    name = local_path(checkpoint.source_id).name if checkpoint.folder else checkpoint.source_id
    label = f"{name}'s own text (at least {tokens:,} tokens at temperature {temperature:g}, seed {seed})"
    if not file.is_file():
        with _explained(file):
            cache.mkdir(parents=True, exist_ok=True)
        _write(checkpoint, file, tokens, seed, temperature, chosen_device(device), progress)
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
    seed: int,
    temperature: float,
    device: str,
    progress: Progress,
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
                writer = _Writer(checkpoint, device, seed, temperature)
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
            rows = ({"text": text} for batch in batches for text in batch["texts"])
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
        model, _ = loading.load_model(checkpoint.folder, torch.float32 if device == "cpu" else "auto")
        self._tokenizer, self._model = tokenizer, model.to(device).eval()
        self._begin = torch.full((BATCH, 1), int(begin), device=self._model.device)
        stated = getattr(model.generation_config, "eos_token_id", None) or tokenizer.eos_token_id
        self._ends = {end for end in (stated if isinstance(stated, list) else [stated]) if end is not None}
        context = stated_positions(checkpoint.config)
        # a model's own settings, such as a repetition penalty, would change its distribution
        self._model.generation_config = GenerationConfig(
            eos_token_id=sorted(self._ends) or None,
            pad_token_id=min(self._ends, default=0) if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
            max_new_tokens=LENGTH if context is None else min(LENGTH, context - 1),
            do_sample=True,
            temperature=temperature,
            top_k=0,
        )

    def batch(self, number: int) -> dict[str, Any]:
        """The texts of a batch that hold any, and the tokens generated for all."""
        import torch

        torch.manual_seed(mix(self._seed, number))
        with torch.inference_mode():
            made = self._model.generate(input_ids=self._begin, attention_mask=torch.ones_like(self._begin))
        rows = [self._until_end(row) for row in made[:, 1:].tolist()]
        texts = [self._tokenizer.decode(row, skip_special_tokens=True) for row in rows]
        return {"texts": [text for text in texts if text.strip()], "tokens": sum(map(len, rows))}

    def _until_end(self, tokens: list[int]) -> list[int]:
        """Tokens up to the first end-of-text, which is included."""
        end = next((at + 1 for at, token in enumerate(tokens) if token in self._ends), len(tokens))
        return tokens[:end]
