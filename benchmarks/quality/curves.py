"""What uptraining brings back: held-out loss against the share of the training tokens, from several starting points.

    python -m benchmarks.quality.curves --cache FOLDER [--models qwen2] [--minutes 60] [--output
    docs/results/uptraining-quality.json]

Starting points are checkpoints converted by mean pooling and by the fit, and the source itself, as a control for what
more training does without any conversion. The loss is the language model's or the divergence from the source (KL). Each
run has a schedule of its own to its own end, is repeated with every learning rate, and the report takes the best. What
tells most is run first: 4:1, fit with KL on 1%, then mean pooling on 10%; the rest follows from cheap to dear. Cells
that the output has already are not run again; a killed run goes on from its last checkpoint. `--dry-run` lists the
cells and their tokens.
"""

import argparse
import shutil
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from benchmarks.records import Cell, Records, fingerprint
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.errors import GQAConvertError
from gqa_convert.training.uptrain import uptrain_checkpoint

from .measure import calibration, loss_of, tokens_for
from .models import DEFAULT_CACHE, MODELS, context_of, groups_of, heads_of, model_folder, objective_of
from .text import training_text

OUTPUT = Path("docs/results/uptraining-quality.json")
ALPHAS = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1)
LEARNING_RATES = (2e-4, 1e-3)
CONTROL = "source"
STARTS = {"mean": ("lm", "kl"), "fit": ("lm", "kl"), CONTROL: ("lm",)}
"""Losses for each starting point; the source has nothing to learn from itself."""
FIRST = (("fit", "kl", 0.01), ("mean", "kl", 0.1), ("mean", "lm", 0.1))
MICRO_BATCH_TOKENS = 2048
HELD_OUT = {"tokens": 50_000, "skipped": 0}
"""Learning rates are chosen on the first held-out files, so that the others stay unseen."""


class Job(NamedTuple):
    """A run; without uptraining it has neither loss nor learning rate."""

    model: str
    groups: int
    start: str
    loss_kind: str | None
    alpha: float
    learning_rate: float | None


def jobs(arguments: argparse.Namespace) -> list[Job]:
    """All runs, those that tell most first: the points without training, then `FIRST`, then by their length."""
    found = []
    for name in arguments.models:
        groups = groups_of(name)[1]
        for start, losses in STARTS.items():
            for alpha in arguments.alphas:
                settings = (
                    [(loss, rate) for loss in losses for rate in arguments.learning_rates] if alpha else [(None, None)]
                )
                found += [
                    Job(name, groups, start, loss, alpha, rate)
                    for loss, rate in settings
                    if loss in (None, *arguments.losses)
                ]
    kept = [job for job in found if job.start in arguments.starts]

    def rank(job: Job) -> tuple[int, float]:
        kind = (job.start, job.loss_kind or "", job.alpha)
        if job.alpha == 0:
            return (0, 0.0)
        return (1 + FIRST.index(kind), 0.0) if kind in FIRST else (1 + len(FIRST), job.alpha)

    return sorted(kept, key=rank)


def start_folder(job: Job, arguments: argparse.Namespace, cache: Path) -> Path:
    """The converted checkpoint that a run starts from, made if it is not there: remove `starts` after a change of the
    method.
    """
    tokens = tokens_for(job.model, arguments.calibration_tokens, cache)
    weights = fingerprint(model_folder(job.model, cache))
    folder = (
        cache / "starts" / f"{job.model}-{weights}-{job.groups}-{job.start}{f'-{tokens}' if job.start == 'fit' else ''}"
    )
    if not folder.is_dir():
        options: dict[str, Any] = {"method": "mean" if job.start == CONTROL else job.start}
        if job.start == "fit":
            options |= calibration(job.model, tokens, 0, cache)
        groups = heads_of(job.model) if job.start == CONTROL else job.groups
        folder.parent.mkdir(parents=True, exist_ok=True)
        convert_checkpoint(model_folder(job.model, cache), folder, groups, **options)
    return folder


def recipe(job: Job, start: Path, training_tokens: int, arguments: argparse.Namespace, cache: Path) -> dict[str, Any]:
    """The run as `gqa-convert uptrain` takes it."""
    context = context_of(job.model)
    values: dict[str, Any] = {
        "model": str(start),
        "output": str(cache / "runs" / "-".join(map(str, job))),
        "data": str(training_text(cache)),
        "objective": objective_of(job.model),
        "alpha": job.alpha,
        "pretraining_tokens": training_tokens,
        "tokens_per_step": arguments.tokens_per_step,
        "sequence_length": context,
        "micro_batch_size": max(1, MICRO_BATCH_TOKENS // context),
        "learning_rate": job.learning_rate,
        "final_learning_rate": 0.0,
        "precision": "no",
        "save_every": 100,
        "keep_checkpoints": 1,
        "compile": arguments.compile,
        "seed": 1,
    }
    return values | ({"teacher": str(model_folder(job.model, cache))} if job.loss_kind == "kl" else {})


def run(job: Job, training_tokens: int, arguments: argparse.Namespace, cache: Path) -> Cell:
    """Convert if need be, uptrain, score; the run's folder does not stay once it is scored."""
    start = start_folder(job, arguments, cache)
    cell: Cell = dict(job._asdict())
    if not job.alpha:
        return cell | {"tokens": 0, "loss": round(loss_of(start, job.model, cache, **HELD_OUT), 4)}
    values = recipe(job, start, training_tokens, arguments, cache)
    folder = Path(values["output"])
    path = folder.with_name(f"{folder.name}.yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    began = time.perf_counter()
    result = uptrain_checkpoint(path, [])
    assert result is not None
    seconds = time.perf_counter() - began
    loss = loss_of(Path(result.model), job.model, cache, **HELD_OUT)
    shutil.rmtree(folder)
    kept = {key: value for key, value in values.items() if key not in ("model", "output", "data", "teacher")}
    return cell | {
        "tokens": result.tokens,
        "steps": result.steps,
        "loss": round(loss, 4),
        "seconds": round(seconds),
        "recipe": kept,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cache", type=Path, default=DEFAULT_CACHE, help="where `benchmarks.quality.train` left the models"
    )
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["qwen2"])
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=list(STARTS))
    parser.add_argument("--losses", nargs="+", choices=("lm", "kl"), default=["lm", "kl"])
    parser.add_argument(
        "--alphas", nargs="+", type=float, default=list(ALPHAS), help="shares of the model's training tokens"
    )
    parser.add_argument("--learning-rates", nargs="+", type=float, default=list(LEARNING_RATES))
    parser.add_argument("--calibration-tokens", type=int, help="for the fit; default: the converter's own")
    parser.add_argument("--tokens-per-step", type=int, default=2048)
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile: a minute for each run, and then much faster on T5"
    )
    parser.add_argument("--minutes", type=float, help="begin no run after this long")
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    cache = arguments.cache.expanduser()
    records = Records(arguments.output, Job._fields)
    sizes = {name: records.model(name, model_folder(name, cache))["training_tokens"] for name in arguments.models}
    waiting = [job for job in jobs(arguments) if not records.find(**job._asdict())]
    if arguments.dry_run:
        for job in waiting:
            sys.stdout.write(f"{' '.join(map(str, job))}: {round(job.alpha * sizes[job.model]):,} tokens\n")
        total = sum(job.alpha * sizes[job.model] for job in waiting)
        sys.stdout.write(f"{len(waiting)} cells, {round(total):,} tokens of uptraining\n")
        return
    records.begin("benchmarks.quality.curves", HELD_OUT["tokens"])
    for name in arguments.models:
        known = records.model(name, model_folder(name, cache))
        if "loss" not in known:
            known["loss"] = round(loss_of(model_folder(name, cache), name, cache, **HELD_OUT), 4)
    began = time.monotonic()
    for job in waiting:
        if arguments.minutes is not None and time.monotonic() - began > 60 * arguments.minutes:
            sys.stdout.write("out of time: the same command goes on\n")
            return
        try:
            cell = run(job, sizes[job.model], arguments, cache)
        except (GQAConvertError, TypeError) as problem:
            sys.stderr.write(f"{' '.join(map(str, job))}: {problem}\n")
            continue
        records.add(cell)
        sys.stdout.write(f"{' '.join(map(str, job))}: {cell['loss']}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
