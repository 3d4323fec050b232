"""Text that a checkpoint writes itself (`self` as a source), generated once into the cache and then read like any other.

Liu et al. 2023 (LLM-QAT) distil on such text where that of the pretraining is not at hand. Each text begins with the
token that begins documents and is sampled from the model's own distribution. Conversations begin as the chat template
begins a user's message, so that the model asks itself, and then answers (Xu et al. 2024, Magpie, section 2).
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gqa_convert.checkpoint.atomic_files import write_whole
from gqa_convert.checkpoint.devices import chosen_device
from gqa_convert.checkpoint.locks import wait_for_lock
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


@dataclass(frozen=True)
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
        return [json.loads(line)["text"] for line in self.file.read_text("utf-8").split("\n")[:-1]]


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
    """The text that a checkpoint writes, generated unless the cache has it; a call that was stopped is continued. If
    several processes call this at once, one generates and the others wait.

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
        OptionError: the model is an encoder-decoder.
        DataError: the tokenizer has no token to begin with, or no chat template.
        OutputError: the file can't be written.
        StoppedError: a signal asked to stop; finished batches are kept.
    """
    checkpoint = open_checkpoint(str(model), download=True)
    assert checkpoint.folder is not None
    files = [
        [str(path), path.stat().st_size, path.stat().st_mtime_ns]
        for path in sorted(checkpoint.folder.iterdir())
        if path.is_file()
    ]
    settings = {"length": LENGTH, "batch": BATCH, "temperature": temperature, "seed": seed, "tokens": tokens}
    key = json.dumps([files, settings, conversations], sort_keys=True)
    file = cache / f"own-text-{hashlib.sha256(key.encode()).hexdigest()[:32]}.jsonl"
    name, kind = local_path(checkpoint.source_id).name, "conversations" if conversations else "text"
    label = f"{name}'s own {kind} (at least {tokens:,} tokens at temperature {temperature:g}, seed {seed})"
    if not file.is_file():
        with _explained(checkpoint.source_id, file):
            cache.mkdir(parents=True, exist_ok=True)
            with wait_for_lock(file.with_suffix(".lock")):
                if not file.is_file():
                    with loading.explained(checkpoint.source_id), loading.no_bars():
                        writer = _Writer(checkpoint, chosen_device(device), temperature, conversations=conversations)
                    _write(writer, file, tokens, seed, progress)
    return OwnText(file, label)


def _write(writer: "_Writer", file: Path, tokens: int, seed: int, progress: OnTokenize) -> None:
    """Generate the file. Batch b is a function of the settings and b alone, so that a run that was interrupted continues
    after its last finished batch and ends with the same file.
    """
    unfinished = file.with_suffix(".unfinished")
    batches = json.loads(unfinished.read_bytes()) if unfinished.is_file() else []
    while (done := sum(batch["tokens"] for batch in batches)) < tokens:
        batches.append(writer.batch(mix(seed, len(batches))))
        write_whole(unfinished, json.dumps(batches).encode())
        progress(GENERATING, min(done + batches[-1]["tokens"], tokens), tokens)
    rows = [json.dumps(row, ensure_ascii=False) + "\n" for batch in batches for row in batch["rows"]]
    write_whole(file, "".join(rows).encode())
    unfinished.unlink(missing_ok=True)


@contextmanager
def _explained(name: str, file: Path) -> Iterator[None]:
    """The errors of generating a file, each as one line."""
    try:
        yield
    except InterruptedRunError as stopped:
        reason = str(stopped).split(":")[0]
        raise StoppedError(f"{reason}: finished batches are kept, run the same command again to resume") from None
    except OSError as problem:
        if is_disk_full(problem):
            raise no_space(file, "continues after the last batch") from None
        raise OutputError(f"{file} can't be written ({problem.strerror or problem})") from None
    except Exception as problem:
        if is_out_of_memory(problem):
            raise DeviceMemoryError(f"out of memory while {name} wrote text of its own: name text instead") from None
        raise


class _Writer:
    """A model with its tokenizer, which writes batches of texts."""

    def __init__(self, checkpoint: Checkpoint, device: str, temperature: float, *, conversations: bool) -> None:
        import torch
        from transformers import GenerationConfig

        name, folder, config = checkpoint.source_id, checkpoint.folder, checkpoint.config
        assert folder is not None
        if loading.is_encoder_decoder(config):
            raise OptionError(f"{name} is an encoder-decoder, and only decoders write text: name text for it instead")
        loading.check_language_model(name, config, _NEEDS_HEAD)
        tokenizer = loading.load_tokenizer(folder)
        begin = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        if begin is None:
            raise DataError("the tokenizer has no token that begins a document: name text instead")
        pad = tokenizer.pad_token_id
        check_vocabulary(config, max(begin, pad or 0), folder)
        self._tokenizer, self._opening, self._between = tokenizer, [int(begin)], None
        if conversations:
            turns = _chat_turns(tokenizer)
            if turns is None:
                raise DataError("the tokenizer has no chat template: name text instead")
            self._opening, self._between = turns
        halves = loading.multiplies_bfloat16(torch.device(device))
        model, _ = loading.load_model(folder, "auto" if halves else torch.float32)
        if halves and model.dtype == torch.float16:
            model = model.to(torch.bfloat16)
        self._model = model.to(device).eval()
        self._context = stated_positions(config)
        stated = model.generation_config.eos_token_id or tokenizer.eos_token_id
        self._ends = stated if isinstance(stated, list) else [stated]
        # a model's own settings, such as a repetition penalty, would change its distribution
        self._model.generation_config = GenerationConfig(
            eos_token_id=stated,
            pad_token_id=(self._ends[0] or 0) if pad is None else pad,
            do_sample=True,
            temperature=temperature,
            top_k=0,
        )

    def batch(self, seed: int) -> dict[str, Any]:
        """The texts of a batch that hold any, or the conversations that have a question, as rows, and the tokens generated
        for all.
        """
        most = LENGTH if self._between is None else QUESTION
        sampled = self._sampled([self._opening] * BATCH, seed, most)
        texts = [text for text in self._tokenizer.batch_decode(sampled, skip_special_tokens=True) if text.strip()]
        tokens = sum(map(len, sampled))
        if self._between is None:
            return {"rows": [{"text": text} for text in texts], "tokens": tokens}
        if not texts:
            raise DataError("the model asks nothing where its chat template lets a user speak: name text instead")
        questions = [text.strip() for text in texts]
        asked = self._tokenizer(questions, add_special_tokens=False)["input_ids"]
        answers = self._sampled([[*self._opening, *ids, *self._between] for ids in asked], mix(seed, 1), LENGTH)
        rows = []
        for question, answer in zip(questions, answers, strict=True):
            answered = self._tokenizer.decode(answer, skip_special_tokens=True)
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answered}]
            rows.append({"messages": messages})
        return {"rows": rows, "tokens": tokens + sum(map(len, answers))}

    def _sampled(self, beginnings: Sequence[Sequence[int]], seed: int, most: int) -> list[list[int]]:
        """The tokens that the model writes behind each beginning, at most so many and as its context allows, up to the first
        end-of-text, which is included.
        """
        import torch
        from torch.nn.utils.rnn import pad_sequence

        torch.manual_seed(seed)
        width = max(map(len, beginnings))
        if self._context is not None:
            most = min(most, self._context - width)
        if most < 1:
            raise DataError(f"a conversation does not fit the model's {self._context} positions: name text instead")
        rows, device = [torch.tensor(beginning) for beginning in beginnings], self._model.device
        pad = self._model.generation_config.pad_token_id
        ids = pad_sequence(rows, batch_first=True, padding_value=pad, padding_side="left").to(device)
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left").to(device)
        with torch.inference_mode():
            made = self._model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=most)
        texts = []
        for tokens in made[:, width:].tolist():
            end = next((at + 1 for at, token in enumerate(tokens) if token in self._ends), len(tokens))
            texts.append(tokens[:end])
        return texts


def has_chat_template(tokenizer: Any) -> bool:
    """Whether conversations can begin with a user's message."""
    return _chat_turns(tokenizer) is not None


def _chat_turns(tokenizer: Any) -> tuple[list[int], list[int]] | None:
    """The tokens before a user's first message, and those between it and the answer; None without a template for that."""
    messages = [{"role": "user", "content": _MARKS[0]}, {"role": "assistant", "content": _MARKS[1]}]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception:  # there is none, or it refuses anything in its own words
        return None
    opening, first, rest = text.partition(_MARKS[0])
    between, second, _ = rest.partition(_MARKS[1])
    if not (first and second and opening):
        return None
    before, after = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (opening, between))
    return before, after
