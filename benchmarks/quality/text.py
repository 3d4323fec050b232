"""Training text and held-out loss: the standard library's sources, one file in twenty held out, as for the bundled
model.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gqa_convert.data.samples import evaluation_blocks
from gqa_convert.data.sources import HELD_OUT
from gqa_convert.data.stdlib_text import read_texts, source_files
from gqa_convert.losses.text_loss import text_loss

HELD_OUT_TOKENS = 100_000
SEEN_TOKENS = 100_000
"""Of the held-out files, from the first one on: what losses were looked at on while methods were designed."""
CALIBRATION_CHARACTERS = 4_000_000


def training_text(cache: Path) -> Path:
    """A JSON-lines file of all training files, with the library's tests, in an order of its own; written once."""
    path = cache / "train.jsonl"
    if not path.is_file():
        texts = read_texts(source_files(held_out=False, with_tests=True))
        np.random.default_rng(0).shuffle(texts)
        _write([json.dumps({"text": text}) for text in texts], path)
    return path


def calibration_text(cache: Path) -> Path:
    """The first files of the training text: many times what a calibration takes, and soon tokenised."""
    path = cache / "calibration.jsonl"
    if not path.is_file():
        lines = training_text(cache).read_text(encoding="utf-8").splitlines()
        sizes = np.cumsum([len(line) for line in lines])
        _write(lines[: int(np.searchsorted(sizes, CALIBRATION_CHARACTERS)) + 1], path)
    return path


def _write(lines: list[str], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    temporary.replace(path)


def held_out_loss(
    model: Any,
    tokenizer: Any,
    *,
    objective: str,
    context: int,
    cache: Path,
    tokens: int = HELD_OUT_TOKENS,
    skipped: int = 0,
) -> float:
    """The loss on tokens of the held-out files, in nats per predicted token.

    Args:
        model: in evaluation mode.
        tokenizer: its own.
        objective: causal, or span_corruption, whose spans are the same for every model.
        context: tokens of the encoder's input; a causal model's own context is used.
        cache: folder of the tokenised text.
        tokens: of text.
        skipped: tokens before them; with span corruption whole blocks.
    """
    if objective == "causal":
        return text_loss(model, _stream(tokenizer, skipped + tokens)[skipped:], batch=8)
    blocks = evaluation_blocks(
        HELD_OUT,
        tokenizer,
        objective=objective,
        sequence_length=context,
        tokens=skipped + tokens,
        cache=cache / "tokens",
        decoder_start=model.config.decoder_start_token_id,
    )
    total, count = 0.0, 0
    with torch.inference_mode():
        for first in range(len(blocks) * skipped // (skipped + tokens), len(blocks), 16):
            batch = {
                name: torch.from_numpy(rows)
                for name, rows in blocks.batch(range(first, min(first + 16, len(blocks)))).items()
            }
            labels = batch.pop("labels").flatten()
            logits = model(**batch, use_cache=False).logits.double().flatten(0, 1)
            total += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
            count += int((labels != -100).sum())
    return total / count


def _stream(tokenizer: Any, tokens: int) -> list[int]:
    ids: list[int] = []
    for text in read_texts(source_files(held_out=True)):
        ids += [*tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids, tokenizer.eos_token_id]
        if len(ids) >= tokens:
            break
    return ids[:tokens]
