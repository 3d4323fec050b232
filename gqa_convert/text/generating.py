"""Generates text with a model: text in the model's own distribution, to calibrate and distil on."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint.devices import chosen_device
from gqa_convert.checkpoint.resource_errors import is_out_of_memory
from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.data.order import mix
from gqa_convert.errors import DataError, DeviceMemoryError, InterruptedRunError, OptionError, StoppedError
from gqa_convert.families import loading
from gqa_convert.families.context_length import stated_positions
from gqa_convert.text.generated_rows import GeneratedRows

GENERATING = "generating text"
"""The label of progress."""
_NEEDS_HEAD = "text is sampled from its predictions; name the language model that the checkpoint was made from"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """How text is generated.

    Attributes:
        tokens: the tokens to generate at least; the last batch is completed.
        length: the most tokens of one text.
        batch: the texts that are generated at once.
        temperature: of the sampling; 0 takes the most likely token each time.
        seed: of the sampling.
        device: such as `cpu` or `cuda:1`; None for a GPU if there is one.
    """

    tokens: int = 100_000
    length: int = 512
    batch: int = 16
    temperature: float = 1.0
    seed: int = 0
    device: str | None = None


def generate_text(
    checkpoint: Checkpoint,
    out: Path,
    options: GenerationOptions,
    progress: Callable[[str, int, int], None] = lambda label, done, total: None,
) -> None:
    """Generate text with a decoder, by transformers' `generate` with its K/V cache. Each text begins with the token that
    begins documents.

    Batch b is a function of the options and b alone, so that a run that was interrupted continues after its last
    finished batch and ends with the same file.

    Args:
        checkpoint: that writes the text, with its files on this machine.
        out: a file of JSON lines with `text`.
        options: how text is generated.
        progress: called with a label, the tokens that are generated and their number.

    Raises:
        OptionError: a number is out of range, or the model is an encoder-decoder.
        DataError: the tokenizer has no token to begin with.
        OutputError: the file can't be written.
        StoppedError: a signal asked to stop; finished batches are kept.
    """
    _check(options)
    device = chosen_device(options.device)
    assert checkpoint.folder is not None
    name = checkpoint.source_id
    if loading.is_encoder_decoder(checkpoint.config):
        raise OptionError(f"{name} is an encoder-decoder, and only decoders write text: name text for it instead")
    loading.check_language_model(name, checkpoint.config, _NEEDS_HEAD)
    with loading.explained(f"the tokenizer of {name}"):
        tokenizer = loading.load_tokenizer(checkpoint.folder)
    context = stated_positions(checkpoint.config)
    with GeneratedRows(out, generation_settings(checkpoint, options)) as rows:
        try:
            with loading.explained(name), loading.no_bars():
                writer = _Writer(checkpoint.folder, tokenizer, options, device, context)
            while rows.tokens < options.tokens:
                rows.add(*writer.batch(rows.batches))
                progress(GENERATING, min(rows.tokens, options.tokens), options.tokens)
        except InterruptedRunError as stopped:
            raise StoppedError(
                f"{str(stopped).split(':')[0]} after {rows.tokens} tokens, which are kept: run the same command again to resume"
            ) from None
        except Exception as problem:
            if is_out_of_memory(problem):
                raise DeviceMemoryError(
                    f"out of memory while {name} wrote text of its own: name text instead"
                ) from None
            raise
        rows.publish()


def _check(options: GenerationOptions) -> None:
    for name, least in (("tokens", 1), ("length", 1), ("batch", 1), ("seed", 0)):
        if getattr(options, name) < least:
            raise OptionError(f"{name} is {getattr(options, name)}: it must be at least {least}")
    if not 0 <= options.temperature <= 100:
        raise OptionError(f"temperature is {options.temperature:g}: it must be at least 0 and at most 100")


def generation_settings(checkpoint: Checkpoint, options: GenerationOptions) -> dict[str, Any]:
    """Everything that the rows depend on; the number of tokens only ends them."""
    assert checkpoint.folder is not None
    weights = [
        [str(path), path.stat().st_size, path.stat().st_mtime_ns]
        for path in sorted(checkpoint.folder.iterdir())
        if path.is_file()
    ]
    return {
        "model": hashlib.sha256(json.dumps(weights).encode()).hexdigest(),
        "length": options.length,
        "batch": options.batch,
        "temperature": options.temperature,
        "seed": options.seed,
    }


class _Writer:
    """A model with its tokenizer, which writes batches of texts."""

    def __init__(
        self,
        folder: Path,
        tokenizer: Any,
        options: GenerationOptions,
        device: str,
        context: int | None,
    ) -> None:
        import torch
        from transformers import GenerationConfig

        self._tokenizer, self._options, self._context = tokenizer, options, context
        model, _ = loading.load_model(folder, torch.float32 if device == "cpu" else "auto")
        self._model = model.to(device).eval()
        stated = getattr(model.generation_config, "eos_token_id", None) or tokenizer.eos_token_id
        self._ends: set[int] = {
            int(each) for each in (stated if isinstance(stated, list) else [stated]) if each is not None
        }
        pad = tokenizer.pad_token_id
        self._pad = int(pad if pad is not None else min(self._ends, default=0))
        sampled = options.temperature > 0
        # a model's own settings, such as a repetition penalty, would change its distribution
        model.generation_config = GenerationConfig(eos_token_id=sorted(self._ends) or None, pad_token_id=self._pad)
        self._settings: dict[str, Any] = {"do_sample": sampled}
        if sampled:
            self._settings |= {"temperature": options.temperature, "top_k": 0}

    def batch(self, number: int) -> tuple[list[dict[str, Any]], int]:
        """The rows of a batch, and the tokens generated for them."""
        import torch

        size = self._options.batch
        inputs = self._starts(range(number * size, (number + 1) * size))
        begun = len(inputs[0])
        room = self._options.length if self._context is None else min(self._options.length, self._context - begun)
        ids = torch.tensor(inputs, device=self._model.device)
        torch.manual_seed(mix(self._options.seed, number))
        with torch.inference_mode():
            made = self._model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=room, **self._settings
            )
        rows, count = [], 0
        for row, written in zip(inputs, made[:, begun:].tolist(), strict=True):
            own = self._until_end(written)
            count += len(own)
            first = [token for token in row if token not in self._tokenizer.all_special_ids]
            text = self._tokenizer.decode([*first, *own], skip_special_tokens=True)
            if text.strip():
                rows.append({"text": text})
        return rows, count

    def _until_end(self, tokens: list[int]) -> list[int]:
        """Tokens up to the first end-of-text, which is included."""
        end = next((at + 1 for at, token in enumerate(tokens) if token in self._ends), len(tokens))
        return tokens[:end]

    def _starts(self, picked: range) -> list[list[int]]:
        """The beginnings of texts: the token that begins documents and, without sampling, the most
        likely first tokens, one for each text.
        """
        import torch

        begin = self._tokenizer.bos_token_id
        if begin is None:
            begin = self._tokenizer.eos_token_id
        if begin is None:
            raise DataError("the tokenizer has no token that begins a document: name text instead")
        if self._options.temperature > 0:
            return [[int(begin)]] * len(picked)
        with torch.inference_mode():
            logits = self._model(torch.tensor([[begin]], device=self._model.device)).logits[0, -1]
        order = logits.argsort(descending=True, stable=True).tolist()
        first = [token for token in order if token not in self._tokenizer.all_special_ids]
        return [[int(begin), first[at % len(first)]] for at in picked]
