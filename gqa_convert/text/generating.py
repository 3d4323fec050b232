"""Generates text with a model: text in the model's own distribution, to calibrate and distil on."""

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint.devices import chosen_device
from gqa_convert.checkpoint.paths import local_path
from gqa_convert.checkpoint.resource_errors import is_out_of_memory
from gqa_convert.checkpoint.results import Result
from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.errors import DataError, DeviceMemoryError, InterruptedRunError, OptionError, StoppedError
from gqa_convert.families import loading
from gqa_convert.families.context_length import stated_positions
from gqa_convert.text.generated_rows import GeneratedRows
from gqa_convert.text.order import mix
from gqa_convert.text.prompts import Prompt, read_prompts

GENERATING = "generating text"
"""The label of progress."""
_NEEDS_HEAD = "text is sampled from its predictions; name the language model that the checkpoint was made from"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """How text is generated.

    Attributes:
        tokens: the tokens to generate at least; the last batch is completed.
        length: the most tokens of one text, without its prompt.
        batch: the texts that are generated at once.
        temperature: of the sampling; 0 takes the most likely token each time.
        top_p: sample among the most likely tokens that have this probability together.
        seed: of the sampling.
        prompts: a file of prompts; None begins each text with the token that begins documents.
        device: such as `cpu` or `cuda:1`; None for a GPU if there is one.
    """

    tokens: int = 100_000
    length: int = 512
    batch: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    prompts: str | None = None
    device: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedText(Result):
    """What `generate-text` has made.

    Attributes:
        file: the result.
        model: the checkpoint that wrote it.
        rows, tokens: how many texts, and how many tokens the model generated for them.
        resumed_tokens: those that an earlier, interrupted run had generated.
        temperature, top_p, seed: of the sampling.
        prompts: the file of prompts; None without one.
        seconds: how long this run took.
    """

    file: str
    model: str
    rows: int
    tokens: int
    resumed_tokens: int
    temperature: float
    top_p: float
    seed: int
    prompts: str | None
    seconds: float


def generate_text(
    model: str | Path,
    out: str | Path,
    options: GenerationOptions | None = None,
    *,
    revision: str | None = None,
    overwrite: bool = False,
    progress: Callable[[str, int, int], None] = lambda label, done, total: None,
) -> GeneratedText:
    """Generate text with a decoder, by transformers' `generate` with its K/V cache.

    Batch b is a function of the options and b alone, so that a run that was interrupted continues after its last
    finished batch and ends with the same file.

    Args:
        model: a folder or a Hub id.
        out: a `.jsonl` or `.parquet` file with `text`, or with `messages` if prompts went through a chat template.
        options: how text is generated.
        revision: of a Hub id.
        overwrite: replace an earlier file.
        progress: called with a label, the tokens that are generated and their number.

    Raises:
        OptionError: a number is out of range, or the model is an encoder-decoder.
        DataError: the prompts can't be used, or the tokenizer has no token to begin with.
        OutputError: the file can't be written.
        StoppedError: a signal asked to stop; finished batches are kept.
    """
    options = options or GenerationOptions()
    began = time.monotonic()
    _check(options)
    device = chosen_device(options.device)
    checkpoint = open_checkpoint(str(model), revision=revision, download=True)
    assert checkpoint.folder is not None
    name = checkpoint.source_id
    if loading.is_encoder_decoder(checkpoint.config):
        raise OptionError(
            f"{name} is an encoder-decoder, and generate-text samples from decoders: name text for it instead"
        )
    loading.check_language_model(name, checkpoint.config, _NEEDS_HEAD)
    with loading.explained(f"the tokenizer of {name}"):
        tokenizer = loading.load_tokenizer(checkpoint.folder)
    prompts = None if options.prompts is None else read_prompts(options.prompts, tokenizer)
    context = stated_positions(checkpoint.config)
    settings = generation_settings(checkpoint, options, prompts)
    with GeneratedRows(local_path(str(out)), settings, overwrite=overwrite) as rows:
        resumed = rows.tokens
        try:
            with loading.explained(name), loading.no_bars():
                writer = _Writer(checkpoint.folder, tokenizer, options, prompts, device, context)
            while rows.tokens < options.tokens and (made := writer.batch(rows.batches)):
                rows.add(*made)
                progress(GENERATING, min(rows.tokens, options.tokens), options.tokens)
        except InterruptedRunError as stopped:
            raise StoppedError(
                f"{str(stopped).split(':')[0]} after {rows.tokens} tokens, which are kept: run the same command again to resume"
            ) from None
        except Exception as problem:
            if is_out_of_memory(problem):
                raise DeviceMemoryError(
                    f"out of memory after {rows.tokens} tokens: start over with a smaller --batch or --length, and --overwrite"
                ) from None
            raise
        rows.publish()
    return GeneratedText(
        file=str(rows.out),
        model=name,
        rows=len(rows.rows),
        tokens=rows.tokens,
        resumed_tokens=resumed,
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
        prompts=options.prompts,
        seconds=round(time.monotonic() - began, 1),
    )


def _check(options: GenerationOptions) -> None:
    for name, least in (("tokens", 1), ("length", 1), ("batch", 1), ("seed", 0)):
        if getattr(options, name) < least:
            raise OptionError(f"--{name} is {getattr(options, name)}: it must be at least {least}")
    if not 0 <= options.temperature <= 100:
        raise OptionError(f"--temperature is {options.temperature:g}: it must be at least 0 and at most 100")
    if not 0 < options.top_p <= 1:
        raise OptionError(f"--top-p is {options.top_p:g}: it must be above 0 and at most 1")


def generation_settings(checkpoint: Any, options: GenerationOptions, prompts: list[Prompt] | None) -> dict[str, Any]:
    """Everything that the rows depend on; the number of tokens only ends them."""
    texts = None if prompts is None else [prompt.text for prompt in prompts]
    weights = [
        [str(path), path.stat().st_size, path.stat().st_mtime_ns]
        for path in sorted(checkpoint.folder.iterdir())
        if path.is_file()
    ]
    return {
        "format": 1,
        "model": hashlib.sha256(json.dumps(weights).encode()).hexdigest(),
        "prompts": None if texts is None else hashlib.sha256(json.dumps(texts).encode()).hexdigest(),
        "length": options.length,
        "batch": options.batch,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "seed": options.seed,
    }


class _Writer:
    """A model with its tokenizer, which writes batches of texts."""

    def __init__(
        self,
        folder: Path,
        tokenizer: Any,
        options: GenerationOptions,
        prompts: list[Prompt] | None,
        device: str,
        context: int | None,
    ) -> None:
        import torch
        from transformers import GenerationConfig

        self._tokenizer, self._options, self._prompts, self._context = tokenizer, options, prompts, context
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
            self._settings |= {"temperature": options.temperature, "top_p": options.top_p, "top_k": 0}

    def batch(self, number: int) -> tuple[list[dict[str, Any]], int] | None:
        """The rows of a batch and the tokens generated for them; None after the last prompt without sampling."""
        import torch

        size = self._options.batch
        picked = range(number * size, (number + 1) * size)
        prompts = self._prompts
        if prompts is None:
            chosen = [Prompt("")] * size
            inputs = self._starts(picked)
        else:
            if self._options.temperature == 0:
                picked = range(picked.start, min(picked.stop, len(prompts)))
            if not picked:
                return None
            chosen = [prompts[at % len(prompts)] for at in picked]
            inputs = [self._tokens_of(prompt) for prompt in chosen]
        longest = max(map(len, inputs))
        room = self._options.length if self._context is None else min(self._options.length, self._context - longest)
        if room < 1:
            raise DataError(
                f"a prompt has {longest} tokens and the model has positions for {self._context}: shorten it"
            )
        ids = torch.tensor([[self._pad] * (longest - len(row)) + row for row in inputs], device=self._model.device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in inputs], device=self._model.device)
        torch.manual_seed(mix(self._options.seed, number))
        with torch.inference_mode():
            made = self._model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=room, **self._settings)
        rows, count = [], 0
        for row, prompt, written in zip(inputs, chosen, made[:, longest:].tolist(), strict=True):
            own = self._until_end(written)
            count += len(own)
            begun = [token for token in row if token not in self._tokenizer.all_special_ids] if prompts is None else []
            text = self._tokenizer.decode([*begun, *own], skip_special_tokens=True)
            if text.strip():
                rows.append(prompt.row(text))
        return rows, count

    def _until_end(self, tokens: list[int]) -> list[int]:
        """Tokens up to the first end-of-text, which is included."""
        end = next((at + 1 for at, token in enumerate(tokens) if token in self._ends), len(tokens))
        return tokens[:end]

    def _tokens_of(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt; a chat template has written the special tokens of a conversation."""
        return list(self._tokenizer(prompt.text, add_special_tokens=prompt.messages is None)["input_ids"])

    def _starts(self, picked: range) -> list[list[int]]:
        """The beginnings of texts without a prompt: the token that begins documents and, without sampling, the most
        likely first tokens, one for each text.
        """
        import torch

        begin = self._tokenizer.bos_token_id
        if begin is None:
            begin = self._tokenizer.eos_token_id
        if begin is None:
            raise DataError("the tokenizer has no token that begins a document: name prompts with --prompts")
        if self._options.temperature > 0:
            return [[int(begin)]] * len(picked)
        with torch.inference_mode():
            logits = self._model(torch.tensor([[begin]], device=self._model.device)).logits[0, -1]
        order = logits.argsort(descending=True, stable=True).tolist()
        first = [token for token in order if token not in self._tokenizer.all_special_ids]
        return [[int(begin), first[at % len(first)]] for at in picked]
