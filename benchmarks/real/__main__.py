"""What each method loses on a real model: SmolLM2-135M-Instruct, whose 3 K/V heads are merged into one.

    python -m benchmarks.real --folder FOLDER [--methods mean fit] [--seeds 0 1 2] [--quick]

FOLDER contains the model and the text, which are made once:

    python -m benchmarks.real.make_source FOLDER/smollm2
    python -m benchmarks.real.text FOLDER/smollm2 FOLDER/text

Each cell is a conversion and its scores: loss and divergence from the source by kind of text and window length, and
retrieval of facts. Scores that the output has already are not measured again, so a killed command
resumes when it is repeated. `python -m benchmarks.real.report` writes the tables of docs/results/README.md.
"""

import argparse
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from benchmarks.records import Cell, Records
from gqa_convert.families.loading import load_model, load_tokenizer
from gqa_convert.measuring.evaluation.retrieval import LENGTHS, QUESTIONS, ask, share_found
from gqa_convert.measuring.evaluation.retrieval_texts import KINDS as FACTS

from .conversions import METHODS, Conversion, Job, converted, discard
from .documents import MIXED, held_out_blocks
from .folders import DEFAULT_FOLDER, GROUPS, SMOLLM2, model_folder, scratch
from .scores import Reference, score
from .text import KINDS

OUTPUT = Path("docs/results/real.json")
PARTS = ("loss", "retrieval")
QUICK_TOKENS = 1024


class Bench:
    """Everything that is measured of one source and its results.

    Args:
        folder: the benchmark's folder.
        weights: fingerprint of the source, part of the names of cached files.
        options: the command's.
    """

    def __init__(self, folder: Path, weights: str, options: argparse.Namespace) -> None:
        self._folder, self._source, self._weights, self._options = folder, model_folder(folder), weights, options
        self._tokenizer = load_tokenizer(self._source)

    def load(self, folder: Path) -> Any:
        model, missing = load_model(folder, getattr(torch, self._options.dtype))
        if missing:
            raise RuntimeError(f"{folder} lacks {', '.join(missing)}")
        return model

    @cached_property
    def _source_model(self) -> Any:
        return self.load(self._source)

    def free(self) -> None:
        """Drop the source from memory."""
        self.__dict__.pop("_source_model", None)
        gc.collect()

    def _windows(self, scores: Cell) -> Iterator[tuple[str, int]]:
        """Kinds and window lengths that have no score yet."""
        done = scores.get("loss", {})
        for window in self._options.windows:
            yield from ((kind, window) for kind in KINDS if str(window) not in done.get(kind, {}))

    def missing(self, scores: Cell) -> list[str]:
        """The parts of a cell that are still to be measured."""
        found = [part for part in self._options.parts if part not in scores]
        return (
            ["loss", *found]
            if "loss" in self._options.parts and "loss" not in found and any(self._windows(scores))
            else found
        )

    def measure(self, scores: Cell, load: Callable[[], Any] | None, save: Callable[[], None]) -> None:
        """Add the missing parts to a cell.

        Args:
            scores: where they go.
            load: returns the model; None for the source itself.
            save: called after each part.
        """
        missing = self.missing(scores)
        model = None if load is None else load()
        for part in missing:
            if part == "loss":
                for kind, window in list(self._windows(scores)):
                    scores.setdefault("loss", {}).setdefault(kind, {})[str(window)] = self._loss(model, kind, window)
                    save()
                continue
            whole = self._source_model if model is None else model
            scores["retrieval"] = retrieval(whole, self._tokenizer, self._options.lengths, self._options.questions)
            save()

    def _loss(self, model: Any, kind: str, window: int) -> Cell | None:
        """The score of a window length; None where the text has no such block."""
        tokens = self._options.tokens
        blocks = held_out_blocks(self._folder, kind, self._tokenizer, window, tokens)
        if not len(blocks):
            return None
        name = f"{self._weights}-{kind}-{window}-{tokens}-{self._options.dtype}.npy"
        reference = Reference(scratch(self._folder, "reference", name), lambda: self._source_model, blocks)
        if model is not None:
            self.free()
        return asdict(score(model, reference, blocks))


def retrieval(model: Any, tokenizer: Any, lengths: Sequence[int], questions: int) -> dict[str, Cell]:
    """The shares of facts that a model finds at each length, and of each kind."""
    answers = ask(model, tokenizer, lengths, questions)
    found: dict[str, Cell] = {}
    for length in lengths:
        here = [each for each in answers if each.length == length]
        by_kind = {kind: share_found([each for each in here if each.kind == kind]).value for kind in FACTS}
        share = share_found(here)
        found[str(length)] = {
            "questions": len(here),
            "found": share.value,
            "found_error": share.error,
            "by_kind": by_kind,
        }
    return found


def jobs(options: argparse.Namespace) -> Iterator[Job]:
    """One seed of everything before the next one, cheap methods first."""
    methods = [method for name, method in METHODS.items() if name in options.methods]
    for number, seed in enumerate(options.seeds):
        for method in methods:
            if not method.calibrated and number:
                continue
            text = (options.calibration, options.calibration_tokens, seed) if method.calibrated else (None,) * 3
            yield Job(SMOLLM2, GROUPS, method.name, *text)


def measure_source(bench: Bench, records: Records) -> None:
    scores = records.data["models"][SMOLLM2].setdefault("scores", {})
    if bench.missing(scores):
        bench.measure(scores, None, records.write)
        bench.free()


def measure_job(bench: Bench, records: Records, job: Job, folder: Path) -> None:
    cell: Cell = records.find(**job._asdict()) or dict(job._asdict())
    if not bench.missing(cell):
        return
    result: Conversion = converted(job, folder)
    cell.setdefault("minutes", result.minutes)
    cell.setdefault("core_minutes", result.core_minutes)
    cell.setdefault("tokens_read", result.tokens)
    cell.setdefault("calibration_kl", result.kl)
    records.add(cell)
    bench.measure(cell, lambda: bench.load(result.folder), records.write)
    discard(result)
    first = {kind: next(iter(each.values())) for kind, each in cell.get("loss", {}).items()}
    shown = ", ".join(f"{kind} {each['loss']} (KL {each['kl']})" for kind, each in first.items() if each)
    sys.stderr.write(f"{' '.join(str(part) for part in job if part is not None)}: {shown}, {cell['minutes']} min\n")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.real", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="with smollm2/ and text/ (%(default)s)")
    parser.add_argument("--output", type=Path, help=f"default: {OUTPUT}; with --quick, quick.json in the folder")
    parser.add_argument("--methods", nargs="+", choices=tuple(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="of calibration (default: 0 1 2)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what is scored (default: all)")
    parser.add_argument("--tokens", type=int, help="held-out tokens per kind of text and window (default: 8192)")
    parser.add_argument("--windows", nargs="+", type=int, help="window lengths (default: 512 2048)")
    parser.add_argument("--questions", type=int, help=f"of each kind at each length (default: {QUESTIONS})")
    parser.add_argument("--calibration", choices=(MIXED, "prose", "code"), default=MIXED, help="kind of text (mixed)")
    parser.add_argument("--calibration-tokens", type=int, help="default: the converter's own")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of scoring (float32)")
    parser.add_argument("--quick", action="store_true", help="a few minutes, to see that everything runs")
    options = parser.parse_args()
    quick = options.quick
    options.folder = options.folder.expanduser()
    options.output = options.output or (options.folder / "quick.json" if quick else OUTPUT)
    options.methods = options.methods or (["mean", "factor"] if quick else list(METHODS))
    options.seeds = options.seeds[:1] if quick else options.seeds
    options.tokens = options.tokens or (QUICK_TOKENS if quick else 8192)
    options.windows = options.windows or ([512] if quick else [512, 2048])
    options.questions = options.questions or (2 if quick else QUESTIONS)
    options.lengths = LENGTHS[:1] if quick else LENGTHS
    return options


def main() -> None:
    options = parsed()
    folder = options.folder
    source = model_folder(folder)
    if not source.is_dir():
        sys.exit(f"{source} is missing: make it with python -m benchmarks.real.make_source {source}")
    records = Records(options.output, Job._fields)
    records.begin("benchmarks.real", options.tokens)
    if records.data.setdefault("dtype", options.dtype) != options.dtype:
        sys.exit(f"{options.output} was scored in {records.data['dtype']}: give that --dtype, or name another --output")
    bench = Bench(folder, records.model(SMOLLM2, source)["weights"], options)
    measure_source(bench, records)
    for job in jobs(options):
        measure_job(bench, records, job, folder)


if __name__ == "__main__":
    main()
