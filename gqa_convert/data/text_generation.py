"""Text that a checkpoint writes itself, for calibration: generated once into the cache and then read like any other.

Liu et al. 2023 (LLM-QAT) distil on such text where that of the pretraining is not at hand. Each text begins with the
token that begins documents and is sampled from the model's own distribution. Conversations begin as the chat template
begins a user's message, so that the model asks itself, and then answers (Xu et al. 2024, Magpie, section 2).
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.data.encoders import template_of_one_day
from gqa_convert.data.model_tokenizer import check_vocabulary
from gqa_convert.data.order import mix
from gqa_convert.errors import DataError, OptionError
from gqa_convert.families import loading
from gqa_convert.families.context_length import stated_positions
from gqa_convert.families.generating import generating_with
from gqa_convert.publishing.atomic_files import write_whole
from gqa_convert.runtime.machine import multiplies_bfloat16
from gqa_convert.runtime.paths import local_path

LENGTH = 512
"""The most tokens of one text."""
QUESTION = 96
"""The most tokens of a question in a conversation."""
BATCH = 32
"""The texts that are generated at once, at most."""
FIRST = 8
"""The texts of the first batch; each batch has twice as many as the one before, so that little is written in vain."""
_MARKS = ("<<question>>", "<<answer>>")
"""Stand for messages while a chat template is taken apart."""
_NEEDS_HEAD = "text is sampled from its predictions; name the language model that the checkpoint was made from"


@dataclass(frozen=True)
class OwnText:
    """Text of a checkpoint's own.

    Attributes:
        file: JSON lines in the cache, with `text`, or for conversations with `messages`.
        label: what it is, for records.
    """

    file: Path
    label: str

    def first_texts(self) -> list[str]:
        """The documents of the first batch, which are the same however many follow."""
        rows = map(json.loads, self.file.read_text("utf-8").split("\n")[:-1])
        return [row["text"] for row in rows if not row["batch"]]


def own_text(
    checkpoint: Checkpoint,
    cache: Path,
    *,
    tokens: int,
    device: str,
    seed: int = 0,
    conversations: bool = False,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> OwnText:
    """The text that a checkpoint writes, generated unless the cache has it.

    The file is found again by the files of the checkpoint that the user named, the number of tokens and the seed.

    Args:
        checkpoint: in a local folder.
        cache: the folder of the file.
        tokens: to generate at least; the last batch is completed.
        device: such as `cpu` or `cuda:1`.
        seed: of the sampling.
        conversations: of one question and one answer, in place of documents.
        progress: called with the tokens that are generated and their number.

    Raises:
        OptionError: the model is an encoder-decoder.
        DataError: the tokenizer has no token to begin with, or no chat template.
    """
    origin = checkpoint.origin
    settings: list[Any] = [
        LENGTH,
        FIRST,
        BATCH,
        seed,
        tokens,
        conversations,
        checkpoint.config["model_type"],
    ]
    for path in sorted(origin.local_folder.iterdir()):
        stat = path.stat()
        settings += [str(path), stat.st_size, stat.st_mtime_ns]
    file = (
        cache / f"own-text-{hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:32]}.jsonl"
    )
    name = local_path(origin.source_id).name
    kind = "conversations" if conversations else "text"
    label = f"{name}'s own {kind} (at least {tokens:,} tokens at temperature 1, seed {seed})"
    if not file.is_file():
        with loading.explained(checkpoint.source_id), loading.no_bars():
            writer = _Writer(checkpoint, device)
        write = writer.conversations if conversations else writer.documents
        rows: list[dict[str, Any]] = []
        done = batches = 0
        while done < tokens:
            size = min(BATCH, FIRST << batches)
            writer.generated = 0
            rows += [row | {"batch": batches} for row in write(mix(seed, batches), size)]
            done += writer.generated or size  # all of them ended at once
            batches += 1
            progress(min(done, tokens), tokens)
        cache.mkdir(parents=True, exist_ok=True)
        write_whole(
            file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        )
    return OwnText(file, label)


class _Writer:
    """A model with its tokenizer, which writes batches of texts.

    Attributes:
        generated: the tokens so far, which the caller may count anew.
    """

    def __init__(self, checkpoint: Checkpoint, device: str) -> None:
        import torch

        name = checkpoint.source_id
        folder = checkpoint.local_folder
        config = checkpoint.config
        if loading.is_encoder_decoder(config):
            raise OptionError(
                f"{name} is an encoder-decoder, and only decoders write text: name text for it instead"
            )
        loading.check_language_model(name, config, _NEEDS_HEAD)
        self._tokenizer = tokenizer = loading.load_tokenizer(folder)
        begin = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        if begin is None:
            raise DataError("the tokenizer has no token that begins a document: name text instead")
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(begin)
        check_vocabulary(config, max(begin, tokenizer.pad_token_id), folder)
        self._begin = begin
        self._context = stated_positions(config)
        dtype = torch.bfloat16 if multiplies_bfloat16(torch.device(device)) else torch.float32
        model, _ = loading.load_model(folder, dtype)
        self._model = model.to(device).eval()
        ends = model.generation_config.eos_token_id or tokenizer.eos_token_id
        self._settings = {
            "eos_token_id": ends,
            "pad_token_id": tokenizer.pad_token_id,
            "do_sample": True,
            "top_k": 0,
        }
        self.generated = 0

    def documents(self, seed: int, size: int) -> list[dict[str, Any]]:
        """A batch of texts as rows, without empty ones."""
        return [
            {"text": text}
            for text in self._texts([[self._begin]] * size, seed, LENGTH)
            if text.strip()
        ]

    def conversations(self, seed: int, size: int) -> list[dict[str, Any]]:
        """A batch of conversations that have a question as rows."""
        turns = _chat_turns(self._tokenizer)
        if turns is None:
            raise DataError("the tokenizer has no chat template: name text instead")
        opening, between = turns
        asked = self._texts([opening] * size, seed, QUESTION)
        questions = [text.strip() for text in asked if text.strip()]
        if not questions:
            raise DataError(
                "the model asks nothing where its chat template lets a user speak: name text instead"
            )
        ids = self._tokenizer(questions, add_special_tokens=False)["input_ids"]
        answers = self._texts(
            [[*opening, *question, *between] for question in ids], mix(seed, 1), LENGTH
        )
        return [
            {
                "messages": [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": answer},
                ]
            }
            for question, answer in zip(questions, answers, strict=True)
        ]

    def _texts(self, beginnings: Sequence[Sequence[int]], seed: int, most: int) -> list[str]:
        """What the model writes behind each beginning; see `_sampled`."""
        sampled = self._sampled(beginnings, seed, most)
        self.generated += int((sampled != self._tokenizer.pad_token_id).sum())
        return list(self._tokenizer.batch_decode(sampled, skip_special_tokens=True))

    def _sampled(self, beginnings: Sequence[Sequence[int]], seed: int, most: int) -> Any:
        """The tokens that the model writes behind each beginning, at most so many and as its context allows, with padding
        behind the end of a text.
        """
        import torch

        torch.manual_seed(seed)
        given = {"input_ids": beginnings}
        rows = self._tokenizer.pad(
            given, padding_side="left", return_attention_mask=True, return_tensors="pt"
        )
        width = rows["input_ids"].shape[1]
        if self._context is not None:
            most = min(most, self._context - width)
        if most < 1:
            raise DataError(
                f"a conversation does not fit the model's {self._context} positions: name text instead"
            )
        with generating_with(self._model, **self._settings), torch.inference_mode():
            made = self._model.generate(**rows.to(self._model.device), max_new_tokens=most)
        return made[:, width:]


def has_chat_template(tokenizer: Any) -> bool:
    """Whether conversations can begin with a user's message."""
    return _chat_turns(tokenizer) is not None


def _chat_turns(tokenizer: Any) -> tuple[list[int], list[int]] | None:
    """The tokens before a user's first message, and those between it and the answer; None without a template for that."""
    messages = [{"role": "user", "content": _MARKS[0]}, {"role": "assistant", "content": _MARKS[1]}]
    try:
        template = template_of_one_day(tokenizer)
        text = str(tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False))
    except Exception:  # there is none, or it refuses anything in its own words
        return None
    opening, _, rest = text.partition(_MARKS[0])
    between, second, _ = rest.partition(_MARKS[1])
    if not (opening and second):
        return None
    before, after = (
        tokenizer(part, add_special_tokens=False)["input_ids"] for part in (opening, between)
    )
    return before, after
