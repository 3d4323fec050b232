"""What each merging method loses: held-out loss after conversion, nothing trained, for every model, method and number
of K/V heads.

    python -m benchmarks.quality.measure --cache FOLDER [--models demo qwen2] [--methods mean factor] [--output
    docs/results/quality.json]

Every cell is `convert_checkpoint` followed by the loss of what it wrote, on held-out text that neither training nor
calibration saw, and on which no loss was looked at before the methods were what they are. Methods that calibrate do so
with three seeds, which choose the text. Cells that the output has already are not measured again, unless `--again
METHOD` says so; methods that this version of the converter lacks are named and left out.
"""

import argparse
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.records import Cell, Records
from gqa_convert.conversion.fit.calibration_text import calibration_tokens_for
from gqa_convert.conversion.options import CalibrationOptions, ConversionOptions
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.errors import GQAConvertError
from gqa_convert.families.loading import load_model, load_tokenizer, read_config

from .models import DEFAULT_CACHE, MODELS, context_of, groups_of, model_folder, objective_of
from .text import SEEN_TOKENS, calibration_text, held_out_loss

OUTPUT = Path("docs/results/quality.json")
SEEDS = (0, 1, 2)
HELD_OUT_TOKENS = 100_000
DATA_FREE = ("mean", "first", "factor")
CALIBRATED = ("factor", "fit")


class Job(NamedTuple):
    """A cell to measure; without calibration tokens it has no seed."""

    model: str
    groups: int
    method: str
    calibration_tokens: int | None
    seed: int | None


def loss_of(folder: Path, name: str, cache: Path) -> float:
    """The loss of a checkpoint of a model on held-out tokens that were not seen before, in nats per token, computed in
    float32.
    """
    model, missing = load_model(folder, torch.float32)
    if missing:
        raise RuntimeError(f"{folder} lacks {', '.join(missing)}")
    return held_out_loss(
        model,
        load_tokenizer(folder),
        objective=objective_of(name),
        context=context_of(name),
        cache=cache,
        tokens=HELD_OUT_TOKENS,
        skipped=SEEN_TOKENS,
    )


def calibration(name: str, tokens: int, seed: int, cache: Path) -> CalibrationOptions:
    """The calibration of a method that takes any: on training text, in blocks as long as those of training."""
    return CalibrationOptions(str(calibration_text(cache)), tokens, context_of(name), seed)


def tokens_for(name: str, asked: int | None, cache: Path) -> int:
    """Calibration tokens: as asked for, or the converter's own default."""
    return asked or calibration_tokens_for(read_config(model_folder(name, cache)))


def jobs(arguments: argparse.Namespace, cache: Path) -> Iterator[Job]:
    """Mean first, on which the figures of all others depend; then one seed of everything before the next, and 4:1
    before the rest.
    """
    kinds: list[tuple[str, int | None]] = [(method, None) for method in DATA_FREE]
    kinds += [(method, seed) for seed in SEEDS[: arguments.seeds] for method in CALIBRATED]
    for method, seed in kinds:
        if arguments.methods and method not in arguments.methods:
            continue
        for place in (1, 0, 2):
            for name in arguments.models:
                tokens = None if seed is None else tokens_for(name, arguments.calibration_tokens, cache)
                yield Job(name, groups_of(name)[place], method, tokens, seed)


def measure(job: Job, cache: Path) -> Cell:
    """Convert and score; the converted folder does not stay."""
    out = cache / "converted" / "-".join(str(part) for part in job if part is not None)
    shutil.rmtree(out, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    options = ConversionOptions(method=job.method)
    if job.calibration_tokens is not None:
        text = calibration(job.model, job.calibration_tokens, job.seed or 0, cache)
        options = ConversionOptions(method=job.method, calibration=text)
    began = time.perf_counter()
    try:
        result = convert_checkpoint(model_folder(job.model, cache), out, job.groups, options)
        seconds = time.perf_counter() - began
        loss = loss_of(out, job.model, cache)
    finally:
        shutil.rmtree(out, ignore_errors=True)
    return {
        **job._asdict(),
        "loss": round(loss, 4),
        "conversion_seconds": round(seconds, 1),
        "method_used": result.plan.effective_method,
    }


def fill_in_shares(records: Records) -> None:
    """The share of mean pooling's gap that each cell closes: 0 as mean pooling, 1 as the source."""
    means = {(cell["model"], cell["groups"]): cell["loss"] for cell in records.cells if cell["method"] == "mean"}
    for cell in records.cells:
        source, mean = records.data["models"][cell["model"]].get("loss"), means.get((cell["model"], cell["groups"]))
        if source is not None and mean is not None and mean != source:
            cell["gap_closed"] = round((mean - cell["loss"]) / (mean - source), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cache", type=Path, default=DEFAULT_CACHE, help="where `benchmarks.quality.train` left the models"
    )
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--methods", nargs="+", choices=sorted({*DATA_FREE, *CALIBRATED}))
    parser.add_argument("--calibration-tokens", type=int, help="default: the converter's own for each model")
    parser.add_argument("--seeds", type=int, choices=(1, 2, 3), default=3, help="of calibration")
    parser.add_argument("--again", nargs="+", default=[], metavar="METHOD", help="measure these anew")
    arguments = parser.parse_args()
    cache = arguments.cache.expanduser()
    records = Records(arguments.output, Job._fields)
    records.begin("benchmarks.quality.measure", HELD_OUT_TOKENS)
    arguments.models = [name for name in arguments.models if _is_there(name, cache)]
    records.drop(
        cell for cell in records.cells if cell["method"] in arguments.again and cell["model"] in arguments.models
    )
    for name in arguments.models:
        known = records.model(name, model_folder(name, cache))
        if "loss" not in known:
            known["loss"] = round(loss_of(model_folder(name, cache), name, cache), 4)
            records.write()
    absent: set[tuple[str, bool]] = set()
    for job in jobs(arguments, cache):
        kind = (job.method, job.calibration_tokens is not None)
        if kind in absent or records.find(**job._asdict()):
            continue
        try:
            cell = measure(job, cache)
        except (GQAConvertError, TypeError) as problem:
            sys.stderr.write(f"{job}: {problem}\n")
            if isinstance(problem, TypeError) or "method" in str(problem):
                absent.add(kind)
            continue
        records.add(cell)
        fill_in_shares(records)
        records.write()
        sys.stdout.write(
            f"{' '.join(str(part) for part in job if part is not None)}: {cell['loss']}, {cell.get('gap_closed')} of the gap\n"
        )
        sys.stdout.flush()


def _is_there(name: str, cache: Path) -> bool:
    there = (model_folder(name, cache) / "training.json").is_file()
    if not there:
        sys.stderr.write(f"no {name} in {cache}: python -m benchmarks.quality.train {name} --cache {cache}\n")
    return there


if __name__ == "__main__":
    main()
