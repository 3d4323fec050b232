"""Text that a checkpoint writes itself: generated once into the cache, and then read like any
other.

A decoder writes documents and conversations. Liu et al. 2023 (LLM-QAT) distil on such text where
that of the pretraining is not at hand. Each document begins with the token that begins documents
and is sampled from the model's own distribution. A conversation begins as the chat template begins
a user's message, so that the model asks itself, and then answers (Xu et al. 2024, Magpie, section
2).

An encoder-decoder writes the targets of inputs whose outputs are not at hand, by greedy search.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal

from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.data.files import Fields, Files
from gqa_convert.data.model_tokenizer import check_vocabulary, refuse_languages, template_of_one_day
from gqa_convert.data.order import mix, shuffled
from gqa_convert.data.sources import TextSource, as_source
from gqa_convert.data.token_files import default_cache
from gqa_convert.errors import DataError, OptionError
from gqa_convert.families import loading
from gqa_convert.families.context_length import block_length, stated_positions
from gqa_convert.families.generating import generating_with
from gqa_convert.publishing.atomic_files import write_whole
from gqa_convert.runtime.machine import multiplies_bfloat16
from gqa_convert.runtime.paths import local_path

from .texts import OpenText

LENGTH = 512
"""The most tokens of a document or an answer."""
QUESTION = 96
"""The most tokens of a question in a conversation."""
BATCH = 32
"""The texts that are generated at once, at most."""
FIRST = 8
"""The texts of the first batch; each has twice as many as the one before, so that little is written
in vain.
"""
TARGET = 256
"""The most tokens of a target."""
TARGETS = 16
"""The inputs that are answered at once."""
_SPARE = 8
"""One in so many tokens is spare: encoding a text again can take fewer than its sampling gave, and
the last text of a block is cut.
"""
_MARKS = ("<<question>>", "<<answer>>")
"""Stand for messages while a chat template is taken apart."""
_NEEDS_HEAD = (
    "text is sampled from its predictions; "
    "name the language model that the checkpoint was made from"
)

Kind = Literal["text", "conversations"]
Written = tuple[list[dict[str, Any]], int]
"""Rows of JSON, and the tokens in them."""


def with_spare(tokens: float) -> int:
    """How many tokens of a model's own text to generate where so many are used."""
    return math.ceil(tokens * (_SPARE + 1) / _SPARE)


@dataclass(frozen=True, slots=True)
class OwnWriter:
    """Lets a checkpoint write, unless the cache has what it writes.

    A file is found again by the files of the checkpoint that the user named, and by what is asked
    for.

    Attributes:
        checkpoint: in a local folder.
        device: such as `cpu` or `cuda:1`.
        seed: of the sampling, and of the order of inputs.
        progress: called with the tokens that are generated and their number.
    """

    checkpoint: Checkpoint
    device: str
    seed: int = 0
    progress: Callable[[int, int], None] = lambda *_: None

    def write(self, tokens: int, kind: Kind = "text") -> OpenText:
        """Documents, or conversations of one question and one answer, by a decoder.

        Args:
            tokens: to generate at least; the last batch is completed.
            kind: of text.

        Raises:
            OptionError: the model is an encoder-decoder.
            DataError: the tokenizer has no token to begin with, or no chat template.
        """
        model_type = self.checkpoint.config["model_type"]
        converses = kind == "conversations"
        settings = [LENGTH, FIRST, BATCH, self.seed, tokens, converses, model_type]
        size = f"at least {tokens:,} tokens at temperature 1, seed {self.seed}"
        name = local_path(self.checkpoint.origin.source_id).name
        label = f"{name}'s own {kind} ({size})"
        return self._kept("own-text", label, settings, tokens, self._sampled(kind))

    def answer(self, text: TextSource, field: str, tokens: int) -> OpenText:
        """Pairs of inputs and of the targets that an encoder-decoder writes for them.

        Args:
            text: rows with inputs. Those of files are taken in random order.
            field: that holds them.
            tokens: of both texts together, after which no more is written.

        Raises:
            DataError: the text can't be read, or the tokenizer marks languages.
        """
        settings = [TARGET, TARGETS, self.seed, tokens, text.identity(), field]
        name = local_path(self.checkpoint.origin.source_id).name
        label = f"{text.label} with targets that {name} writes"
        return self._kept("targets", label, settings, tokens, self._answered(text, field))

    def _kept(
        self, name: str, label: str, settings: list[Any], tokens: int, batches: Iterable[Written]
    ) -> OpenText:
        """The file of JSON lines with what these settings yield, at least so many tokens."""
        stated = [*settings]
        for path in sorted(self.checkpoint.origin.local_folder.iterdir()):
            stat = path.stat()
            stated += [str(path), stat.st_size, stat.st_mtime_ns]
        key = hashlib.sha256(json.dumps(stated, default=str).encode()).hexdigest()[:32]
        file = default_cache() / f"{name}-{key}.jsonl"
        if not file.is_file():
            lines = ""
            done = 0
            self.progress(done, tokens)  # a batch takes minutes
            for rows, size in batches:
                for row in rows:
                    lines += json.dumps(row, ensure_ascii=False) + "\n"
                done += size
                self.progress(min(done, tokens), tokens)
                if done >= tokens:
                    break
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, lines.encode())
        return OpenText(as_source(file), Files(label, [file]))

    def _sampled(self, kind: Kind) -> Iterator[Written]:
        """Batches of documents or conversations without end, those of the first with the batch
        0.
        """
        with loading.explained(self.checkpoint.source_id), loading.quiet():
            decoder = _Decoder(self.checkpoint, self.device)
        write = decoder.conversations if kind == "conversations" else decoder.documents
        for batch in count():
            size = min(BATCH, FIRST << batch)
            rows, generated = write(mix(self.seed, batch), size)
            # where all of them ended at once, they count nevertheless, so that there is an end
            yield [row | {"batch": batch} for row in rows], generated or size

    def _answered(self, text: TextSource, field: str) -> Iterator[Written]:
        """Batches of inputs that hold text with what the model writes for them."""
        import torch

        # Read the inputs, those of files in random order.
        pieces = text.pieces(Fields((field,)))
        inputs: Iterator[str] = (piece.text for piece in pieces if piece.text.strip())
        if not text.is_stream:
            inputs = iter(shuffled(list(inputs), mix(self.seed, 7)))

        # Load the model, and let it write.
        with loading.explained(self.checkpoint.source_id), loading.quiet():
            tokenizer = loading.load_tokenizer(self.checkpoint.local_folder)
            refuse_languages(tokenizer)
            model = _loaded(self.checkpoint, self.device)
        longest = block_length(self.checkpoint.config)
        read = {"padding": True, "truncation": True, "max_length": longest, "return_tensors": "pt"}
        greedily = {"num_beams": 1, "do_sample": False, "max_new_tokens": TARGET}
        while group := list(islice(inputs, TARGETS)):
            ids = tokenizer(group, **read).to(model.device)
            with torch.inference_mode(), loading.quiet():
                made = model.generate(**ids, **greedily)
            targets = tokenizer.batch_decode(made, skip_special_tokens=True)
            size = int(ids["attention_mask"].sum()) + sum(map(len, tokenizer(targets)["input_ids"]))
            pairs = zip(group, targets, strict=True)
            yield [{"source": source, "target": target} for source, target in pairs], size


def first_texts(written: OpenText) -> list[str]:
    """The documents of the first batch, which are the same however many follow."""
    lines = Path(written.stated.source).read_text("utf-8").split("\n")[:-1]
    rows = map(json.loads, lines)
    return [row["text"] for row in rows if not row["batch"]]


def _loaded(checkpoint: Checkpoint, device: str) -> Any:
    """The model of a checkpoint on a device, in bfloat16 where the device multiplies that."""
    import torch

    dtype = torch.bfloat16 if multiplies_bfloat16(torch.device(device)) else torch.float32
    model, _ = loading.load_model(checkpoint.local_folder, dtype)
    return model.to(device).eval()


class _Decoder:
    """A loaded decoder with its tokenizer, which writes batches of texts."""

    def __init__(self, checkpoint: Checkpoint, device: str) -> None:
        name, config = checkpoint.source_id, checkpoint.config
        if loading.is_encoder_decoder(config):
            raise OptionError(
                f"{name} is an encoder-decoder, and only decoders write text: "
                "name text for it instead"
            )
        loading.check_language_model(name, config, _NEEDS_HEAD)
        self._tokenizer = tokenizer = loading.load_tokenizer(checkpoint.local_folder)
        begin = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        if begin is None:
            raise DataError("the tokenizer has no token that begins a document: name text instead")
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(begin)
        check_vocabulary(config, max(begin, tokenizer.pad_token_id), checkpoint.local_folder)
        self._begin = begin
        self._context = stated_positions(config)
        self._model = _loaded(checkpoint, device)
        self._settings = {
            "eos_token_id": self._model.generation_config.eos_token_id or tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "do_sample": True,
            "top_k": 0,
        }

    def documents(self, seed: int, size: int) -> Written:
        """A batch of documents without empty ones."""
        texts, generated = self._texts([[self._begin]] * size, seed, LENGTH)
        return [{"text": text} for text in texts if text.strip()], generated

    def conversations(self, seed: int, size: int) -> Written:
        """A batch of conversations that have a question."""
        turns = _chat_turns(self._tokenizer)
        if turns is None:
            raise DataError("the tokenizer has no chat template: name text instead")
        opening, between = turns
        asked, first = self._texts([opening] * size, seed, QUESTION)
        questions = [text.strip() for text in asked if text.strip()]
        if not questions:
            raise DataError(
                "the model asks nothing where its chat template lets a user speak: "
                "name text instead"
            )
        ids = self._tokenizer(questions, add_special_tokens=False)["input_ids"]
        beginnings = [[*opening, *question, *between] for question in ids]
        answers, second = self._texts(beginnings, mix(seed, 1), LENGTH)
        rows = []
        for question, answer in zip(questions, answers, strict=True):
            user = {"role": "user", "content": question}
            rows.append({"messages": [user, {"role": "assistant", "content": answer}]})
        return rows, first + second

    def _texts(
        self, beginnings: Sequence[Sequence[int]], seed: int, most: int
    ) -> tuple[list[str], int]:
        """What the model writes behind each beginning, and the tokens of all; see `_sampled`."""
        sampled = self._sampled(beginnings, seed, most)
        generated = int((sampled != self._tokenizer.pad_token_id).sum())
        return list(self._tokenizer.batch_decode(sampled, skip_special_tokens=True)), generated

    def _sampled(self, beginnings: Sequence[Sequence[int]], seed: int, most: int) -> Any:
        """The tokens that the model writes behind each beginning, with padding behind the end of a
        text.

        They are at most so many, and as its context allows.
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
                f"a conversation does not fit the model's {self._context} positions: "
                "name text instead"
            )
        with generating_with(self._model, **self._settings), torch.inference_mode():
            made = self._model.generate(**rows.to(self._model.device), max_new_tokens=most)
        return made[:, width:]


def has_chat_template(tokenizer: Any) -> bool:
    """Whether conversations can begin with a user's message."""
    return _chat_turns(tokenizer) is not None


def _chat_turns(tokenizer: Any) -> tuple[list[int], list[int]] | None:
    """The tokens before a user's first message, and those between it and the answer.

    None without a template for that.
    """
    question, answer = _MARKS
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    try:
        template = template_of_one_day(tokenizer)
        text = str(tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False))
    except Exception:  # there is none, or it refuses anything in its own words
        return None
    opening, _, rest = text.partition(question)
    between, found, _ = rest.partition(answer)
    if not (opening and found):
        return None
    before, after = tokenizer([opening, between], add_special_tokens=False)["input_ids"]
    return before, after
