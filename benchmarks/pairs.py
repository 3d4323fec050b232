"""What calibration on its own task saves of an encoder-decoder, against running text.

    python -m benchmarks.pairs FOLDER --output docs/results/pairs.json

A small T5 learns to write numbers in digits ("three hundred and five" -> "3 0 5") beside T5's span
corruption of lines that state both, as an instructed T5 has learned tasks after its pretraining.
Its 12 K/V heads are then merged into fewer, with the same numbers as pairs, as running text, and as
inputs that the source answers. Judged by numbers that neither has seen: exact answers, loss, and
the divergence from the source.
"""

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForSeq2SeqLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from benchmarks.records import Records, gqa_convert
from gqa_convert.data.order import mix
from gqa_convert.data.span_corruption import SpanCorruption

SMALL = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
OTHERS = ["hundred", "thousand", "million", "and", "is"]
SIZES = ((10**6, "million"), (1000, "thousand"), (100, "hundred"))
STEPS, ROWS, RATE = 1500, 128, 1e-3
LENGTH = 64
"""Tokens that the encoder reads, in span corruption."""
HELD_OUT = 1000
"""Numbers that are asked for."""
TEXTS = {"pairs": "pairs.jsonl", "running text": "text.jsonl", "inputs alone": "inputs.jsonl"}


def in_words(number: int) -> list[str]:
    """The English words of a number below a thousand million."""
    if number < 20:
        return [SMALL[number]]
    if number < 100:
        rest = [SMALL[number % 10]] if number % 10 else []
        return [TENS[number // 10 - 2], *rest]
    size, name = next(each for each in SIZES if number >= each[0])
    left = number % size
    joined = ["and"] if 0 < left < 100 else []
    return [*in_words(number // size), name, *joined, *(in_words(left) if left else [])]


def pair(number: int) -> dict[str, str]:
    return {"source": " ".join(in_words(number)), "target": " ".join(str(number))}


def numbers(seed: int, *, held_out: bool) -> Iterator[int]:
    """Numbers of all lengths. One in sixteen is held out."""
    chance = random.Random(seed)
    while True:
        number = chance.randrange(10 ** chance.randint(1, 9))
        if (mix(number) % 16 == 0) == held_out:
            yield number


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Words, and sentinels as T5's."""
    words = ["<pad>", "</s>", "<unk>", *SMALL, *TENS, *OTHERS, *map(str, range(10))]
    words += [f"<extra_id_{number}>" for number in reversed(range(100))]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    sentinels = [f"<extra_id_{number}>" for number in range(100)]
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=sentinels,
    )


def train(folder: Path) -> None:
    """Train the source, and save it."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=192,
        d_kv=24,
        num_heads=12,
        d_ff=512,
        num_layers=3,
        num_decoder_layers=3,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )
    model = T5ForConditionalGeneration(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS, pct_start=0.05)
    corruption = SpanCorruption(tokenizer, 0, LENGTH)
    drawn = numbers(1, held_out=False)
    for step in range(STEPS):
        if step % 4:
            rows = [pair(next(drawn)) for _ in range(ROWS)]
            batch = tokenizer([row["source"] for row in rows], padding=True, return_tensors="pt")
            labels = tokenizer([row["target"] for row in rows], padding=True, return_tensors="pt")[
                "input_ids"
            ]
            batch["labels"] = labels.masked_fill(labels == 0, -100)
        else:
            batch = corrupted(tokenizer, corruption, drawn, step)
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        optimizer.zero_grad()
        if step % 100 < 2:
            print(f"step {step} of {STEPS}: loss {loss.item():.4f}", flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def corrupted(
    tokenizer: Any, corruption: SpanCorruption, drawn: Iterator[int], step: int
) -> dict[str, Any]:
    """A batch of span corruption of lines behind one another."""
    count = ROWS // 4
    ids: list[int] = []
    while len(ids) < count * corruption.raw:
        ids += tokenizer(line(pair(next(drawn))), add_special_tokens=False)["input_ids"]
    raw = torch.tensor(ids[: count * corruption.raw]).view(count, -1).numpy()
    made = corruption.batch(raw, [(mix(step), row) for row in range(count)])
    return {
        name: torch.from_numpy(array) for name, array in made.items() if name != "decoder_input_ids"
    }


def line(row: dict[str, str]) -> str:
    return f"{row['source']} is {row['target']}"


def write_texts(folder: Path) -> None:
    """Calibration on numbers of the training, and numbers that are held out."""
    drawn = numbers(2, held_out=False)
    rows = [pair(next(drawn)) for _ in range(8000)]
    write(folder / TEXTS["pairs"], rows)
    write(folder / TEXTS["running text"], [{"text": line(row)} for row in rows])
    write(folder / TEXTS["inputs alone"], [{"source": row["source"]} for row in rows])
    held_out = numbers(3, held_out=True)
    write(folder / "held-out.jsonl", [pair(next(held_out)) for _ in range(HELD_OUT)])


def write(path: Path, rows: Sequence[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def exact_answers(model: Path, folder: Path) -> float:
    """The share of held-out numbers that a model writes without a mistake, by greedy search."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(model, trust_remote_code=True).eval()
    rows = [json.loads(each) for each in (folder / "held-out.jsonl").read_text().splitlines()]
    right = 0
    for first in range(0, len(rows), 100):
        group = rows[first : first + 100]
        read = tokenizer([row["source"] for row in group], padding=True, return_tensors="pt")
        made = loaded.generate(**read, max_new_tokens=12, do_sample=False, num_beams=1)
        texts = tokenizer.batch_decode(made, skip_special_tokens=True)
        right += sum(text == row["target"] for text, row in zip(texts, group, strict=True))
    return right / len(rows)


def score(model: Path, source: Path, folder: Path) -> dict[str, Any]:
    fields = ["--source-field", "source", "--target-field", "target"]
    found, _ = gqa_convert(
        "evaluate", model, "--reference", source, "--data", folder / "held-out.jsonl", *fields
    )
    result = found["results"][0]
    return {"exact": exact_answers(model, folder), "loss": result["loss"], "kl": result["kl"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="of models and text")
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[2, 1], help="(%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="(%(default)s)")
    options = parser.parse_args()
    folder, source = options.folder, options.folder / "source"
    folder.mkdir(parents=True, exist_ok=True)
    if not source.exists():
        train(source)
    write_texts(folder)
    records = Records(options.output, ("kv_heads", "text", "seed"), "benchmarks.pairs")
    cell = records.cell(kv_heads=12, text="source", seed=0)
    if "exact" not in cell:
        cell |= score(source, source, folder)
        records.write()
    for kv_heads in options.kv_heads:
        ways = [("mean", 0, ["--method", "mean"])]
        for seed in options.seeds:
            ways += [
                (text, seed, ["--calibration", str(folder / TEXTS[text]), "--seed", str(seed)])
                for text in TEXTS
            ]
        for text, seed, words in ways:
            cell = records.cell(kv_heads=kv_heads, text=text, seed=seed)
            if "exact" in cell:
                continue
            out = folder / "out"
            _, minutes = gqa_convert(
                "convert", source, out, "--kv-heads", str(kv_heads), *words, "--overwrite"
            )
            cell |= minutes | score(out, source, folder)
            records.write()
            print(
                kv_heads,
                text,
                seed,
                {key: round(cell[key], 4) for key in ("exact", "loss", "kl")},
                flush=True,
            )


if __name__ == "__main__":
    main()
