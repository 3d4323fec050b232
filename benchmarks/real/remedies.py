"""What other text in `fit` does to SmolLM2's results: kinds that are mixed in, made-up records, and longer blocks.

    python -m benchmarks.real.remedies prose prose+mix --folder FOLDER --device cuda

FOLDER holds `source` (make_source) and `text` (text.py). Each variant is converted from its own batches and scored:
divergence by kind of text, and answers found. A variant's seed stands behind an @. On a GPU several processes can share
the work.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from gqa_convert.checkpoint.atomic_files import write_whole
from gqa_convert.conversion.fit.mixed_text import MadeUpRecords
from gqa_convert.conversion.fit.stretched_blocks import stretched
from gqa_convert.conversion.options import CalibrationOptions, ConversionOptions
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.data.order import Integers
from gqa_convert.families.loading import load_model, load_tokenizer
from gqa_convert.measuring.evaluation.retrieval import ask, share_found

OUTPUT = Path("docs/results/remedies.json")
CONTEXT, LENGTH, ROWS = 8192, 1024, 2
LAYER_BATCHES, JUDGING_BATCHES = 12, 2
WINDOWS = {1024: 24, 4096: 6, 8192: 4}
"""Held-out windows of each kind, by their tokens."""
LENGTHS, QUESTIONS = (512, 1024, 2048, 4096), 32
SHORT_FITS = (0, 1, 8, 10, 16, 18)
"""The layers that `--kv-budget 47%` once chose to keep their 3 K/V heads, by short fits on prose alone."""
KEPT = {
    "short fits, prose": SHORT_FITS,
    "alone, prose": (1, 3, 11, 18, 19, 27),
    "alone, records": (1, 18, 19, 20, 23, 24),
    "alone, answers": (12, 18, 20, 21, 23, 29),
    "restored, records": (1, 14, 17, 18, 20, 23),
    "restored, answers": (8, 11, 12, 20, 21, 23),
    "restored, answers, 3 layers": (12, 20, 23),
    "restored, answers, 1 layer": (23,),
}
"""Layers that keep 3 heads by what `where_lost` measured: merged alone in the source, or restored in the result."""

PARAGRAPH = range(150, 500)
"""Characters of prose among which facts are scattered."""

Shares = dict[str, float]
PROSE: Shares = {"prose": 1}
MIX: Shares = {"prose": 0.70, "code": 0.15, "own": 0.08, "chat": 0.07}
RECORDS: Shares = {"prose": 0.55, "code": 0.13, "own": 0.06, "chat": 0.06, "records": 0.20}
DEFAULT: Shares = {"prose": 0.75, "code": 0.08, "own": 0.05, "chat": 0.05, "records": 0.07}
NO_RECORDS: Shares = {"prose": 0.75, "code": 0.08, "own": 0.085, "chat": 0.085}
CODE: Shares = {"code": 1}
CODE_MIX: Shares = {"code": 0.70, "prose": 0.15, "own": 0.08, "chat": 0.07}
CHAT: Shares = {"chat": 1}
SHORT = ((LENGTH, ROWS, 200),)
HALF_LONG = ((LENGTH, ROWS, 100), (4096, 1, 50))


class Variant(NamedTuple):
    """Shares of the layers' text and of the last stage's, its blocks as (tokens, rows, steps), and K/V heads."""

    layers: Shares
    last: Shares
    blocks: tuple[tuple[int, int, int], ...] = SHORT
    heads: int | list[int] = 1


def keeping(layers: tuple[int, ...]) -> list[int]:
    """K/V heads of each layer."""
    return [3 if layer in layers else 1 for layer in range(30)]


VARIANTS = {
    "prose": Variant(PROSE, PROSE),
    "default": Variant(DEFAULT, DEFAULT),
    "default, no records": Variant(NO_RECORDS, NO_RECORDS),
    "prose+records": Variant(RECORDS, RECORDS),
    "prose+records, half long": Variant(MIX, RECORDS, HALF_LONG),
    "code": Variant(CODE, CODE),
    "code+mix": Variant(CODE_MIX, CODE_MIX),
    "chat": Variant(CHAT, CHAT),
    "prose, 47%": Variant(PROSE, PROSE, heads=keeping(SHORT_FITS)),
    "prose+mix, 47%, layers": Variant(MIX, MIX, (), keeping(SHORT_FITS)),
    "prose+records, half long, 47%": Variant(MIX, RECORDS, HALF_LONG, keeping(SHORT_FITS)),
    **{f"default, {rule}": Variant(DEFAULT, DEFAULT, heads=keeping(layers)) for rule, layers in KEPT.items()},
}


class Text:
    """Blocks of every kind, each token once before any twice.

    Args:
        folder: of the benchmark.
        tokenizer: the source's.
        seed: of where each kind begins.
    """

    def __init__(self, folder: Path, tokenizer: Any, seed: int) -> None:
        self._folder, self._tokenizer, self._seed = folder, tokenizer, seed
        self._kept: dict[tuple[str, int], Integers] = {}
        self._used: dict[tuple[str, int], int] = {}

    def block(self, kind: str, length: int) -> Integers:
        """[length], the next block of a kind."""
        key = (kind, length if kind == "records" else 0)
        if key not in self._kept:
            self._kept[key] = self._read(kind, length)
        tokens = self._kept[key]
        begin = self._used.get(key, self._seed * 7919 % 1000)
        if begin + length > len(tokens):
            begin = 0
        self._used[key] = begin + length
        return tokens[begin : begin + length]

    def _read(self, kind: str, length: int) -> Integers:
        if kind == "records":
            paragraphs = []
            for line in (self._folder / "text" / "prose-calibration.jsonl").open():
                parts = json.loads(line)["text"].split("\n\n")
                paragraphs += [part for part in parts if len(part) in PARAGRAPH]
            return MadeUpRecords(self._seed + length, paragraphs[:3000]).blocks(self._tokenizer, length, 200)
        return tokens_of_file(self._folder / "text" / f"{kind}-calibration.jsonl", self._tokenizer, 1_000_000)


def tokens_of_file(file: Path, tokenizer: Any, most: int) -> Integers:
    """The tokens of the documents in a file of `text`, at most so many."""
    ids: list[int] = []
    for line in file.open():
        ids += [*tokenizer(json.loads(line)["text"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        if len(ids) >= most:
            break
    return np.array(ids[:most], np.int64)


def batches(text: Text, shares: Shares, blocks: tuple[tuple[int, int, int], ...], seed: int) -> Iterator[Any]:
    """Batches of blocks whose kinds have these shares, in a random order."""
    first = 0
    for length, rows, count in blocks:
        kinds = [kind for kind, share in shares.items() for _ in range(round(share * rows * count))]
        kinds = (kinds + [next(iter(shares))] * rows * count)[: rows * count]
        random.Random(seed * 1000 + length).shuffle(kinds)
        for begin in range(0, rows * count, rows):
            drawn = kinds[begin : begin + rows]
            ids = np.stack([text.block(kind, length) for kind in drawn])
            made = stretched(ids, first, CONTEXT, seed, [kind != "records" for kind in drawn])
            first += rows
            yield {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in made.items()}


def convert(folder: Path, name: str, device: str) -> Path:
    """The result of a variant."""
    base, _, seed_text = name.partition("@")
    variant, seed = VARIANTS[base], int(seed_text or 0)
    out = folder / "remedies" / name
    if out.is_dir():
        return out
    text = Text(folder, load_tokenizer(folder / "source"), seed)
    for_layers = batches(text, variant.layers, ((LENGTH, ROWS, LAYER_BATCHES + JUDGING_BATCHES),), seed)
    learned = [*for_layers, *batches(text, variant.last, variant.blocks, seed + 1)]
    steps = sum(count for *_, count in variant.blocks)
    tokens = LENGTH * ROWS * LAYER_BATCHES
    calibration = CalibrationOptions(batches=learned, tokens=tokens, seed=seed, kl_steps=steps, device=device)
    out.parent.mkdir(exist_ok=True)
    convert_checkpoint(folder / "source", out, variant.heads, ConversionOptions(calibration=calibration))
    return out


def score(folder: Path, out: Path, device: str) -> dict[str, Any]:
    """Divergence from the source by kind and window, and the shares of answers found by length."""
    tokenizer = load_tokenizer(folder / "source")
    source, model = (load_model(each, torch.bfloat16)[0].to(device).eval() for each in (folder / "source", out))
    found: dict[str, Any] = {"kl": {}, "found": {}}
    for kind in ("prose", "code", "chat"):
        ids = tokens_of_file(folder / "text" / f"{kind}-held-out.jsonl", tokenizer, 60_000)
        for window, most in WINDOWS.items():
            count = min(most, len(ids) // window)
            rows = torch.from_numpy(ids[: count * window]).view(count, 1, window).to(device)
            if count:
                found["kl"][f"{kind} {window}"] = sum(_divergence(source, model, row) for row in rows) / count
    answers = ask(model, tokenizer, LENGTHS, QUESTIONS, 0)
    for length in LENGTHS:
        found["found"][length] = share_found([each for each in answers if each.length == length]).value
    return found


def _divergence(source: Any, model: Any, ids: Any) -> float:
    """KL(source || model) of a window, in nats per token."""
    total = 0.0
    with torch.inference_mode():
        wanted, given = source(ids).logits[0, :-1], model(ids).logits[0, :-1]
        for theirs, ours in zip(wanted.split(LENGTH), given.split(LENGTH), strict=True):
            theirs, ours = theirs.float().log_softmax(-1), ours.float().log_softmax(-1)
            total += float((theirs.exp() * (theirs - ours)).sum())
    return total / float(ids.shape[1] - 1)


def main() -> None:
    """Convert and score the variants that were named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(VARIANTS), help=f"of: {', '.join(VARIANTS)}; @1 for seed 1")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    for name in options.names:
        out = convert(options.folder, name, options.device)
        found = score(options.folder, out, options.device)
        print(name, json.dumps(found))
        known = json.loads(options.output.read_text()) if options.output.is_file() else {}
        write_whole(options.output, (json.dumps(known | {name: found}, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
