"""What uptraining adds to a conversion of SmolLM2-135M, from several starting points.

    python -m benchmarks.real.uptraining --folder FOLDER [--starts mean fit-100] [--tokens 131072] [--objective lm]

FOLDER is that of `benchmarks.real`. A cell is a starting point and a number of tokens: the conversion is trained as
a whole on so many tokens of the calibration text, with a schedule of its own, and scored as in `benchmarks.real`. The
objective is `kl`, the match with the source's predictions, or `lm`, the next token of the text. A killed command
resumes when it is repeated. `python -m benchmarks.real.report` writes the table of docs/results/README.md.
"""

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from benchmarks.records import Cell, Records
from gqa_convert.training.uptrain import uptrain_checkpoint

from . import conversions
from .__main__ import Bench
from .conversions import METHODS, Stopwatch, converted
from .documents import MIXED, calibration_file
from .folders import DEFAULT_FOLDER, GROUPS, SMOLLM2, model_folder, scratch
from .needle import LENGTHS

OUTPUT = Path("docs/results/real-uptraining.json")
RATES = {"mean": 1e-3}
"""Peak learning rates by starting point; `FITTED_RATE` for the others."""
FITTED_RATE = 2e-4
TOKENS_PER_STEP = 2048
SEQUENCE_LENGTH = 1024
HELD_OUT_TOKENS = 8192
CALIBRATION_TOKENS = 24_576
OBJECTIVES = ("kl", "lm")


class Job(NamedTuple):
    """What tells cells apart; `model` is the source."""

    model: str
    groups: int
    start: str
    tokens: int
    seed: int
    objective: str


def start(job: Job, folder: Path) -> Path:
    """The conversion that a run begins with; it stays for further runs."""
    text = (MIXED, CALIBRATION_TOKENS, job.seed) if METHODS[job.start].calibrated else (None,) * 3
    return converted(conversions.Job(job.model, job.groups, job.start, *text), folder).folder


def recipe(job: Job, folder: Path, rate: float | None) -> dict[str, Any]:
    """The run as `gqa-convert uptrain` takes it, with a peak learning rate or, where it is None, the usual one."""
    return {
        "model": str(start(job, folder)),
        "output": str(scratch(folder, "uptrained", "-".join(map(str, job)))),
        "data": str(calibration_file(folder, MIXED)),
        **({"teacher": str(model_folder(folder))} if job.objective == "kl" else {}),
        "tokens": job.tokens,
        "tokens_per_step": TOKENS_PER_STEP,
        "sequence_length": SEQUENCE_LENGTH,
        "learning_rate": rate or RATES.get(job.start, FITTED_RATE),
        "final_learning_rate": 0.05,
        "warmup_steps": 5,
        "save_every": 20,
        "keep_checkpoints": 1,
        "seed": job.seed + 1,
    }


def uptrained(job: Job, folder: Path, rate: float | None) -> tuple[Path, dict[str, Any]]:
    """The trained checkpoint, and what it took; a run that was killed goes on."""
    values = recipe(job, folder, rate)
    output = Path(values["output"])
    times, path = output.with_suffix(".json"), output.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    watch = Stopwatch(times)
    result = uptrain_checkpoint(path, [], on_step=lambda metrics, steps: watch.save())
    watch.save()
    assert result is not None
    minutes, core_minutes = (round(each, 2) for each in watch.minutes)
    kept = {key: value for key, value in values.items() if key not in ("model", "output", "data", "teacher")}
    return Path(result.model), {"minutes": minutes, "core_minutes": core_minutes, "recipe": kept}


def measure(job: Job, bench: Bench, records: Records, folder: Path, rate: float | None) -> None:
    cell: Cell = records.find(**job._asdict()) or dict(job._asdict())
    if not bench.missing(cell):
        return
    if job.tokens:
        trained, cost = uptrained(job, folder, rate)
        cell |= {key: value for key, value in cost.items() if key not in cell}
    else:
        trained = start(job, folder)
    records.add(cell)
    bench.measure(cell, lambda: bench.load(trained), records.write)
    if job.tokens:
        output = scratch(folder, "uptrained", "-".join(map(str, job)))
        shutil.rmtree(output)
        for suffix in (".json", ".yaml"):
            output.with_suffix(suffix).unlink()
    sys.stderr.write(f"{' '.join(map(str, job))}: {cell['loss']}\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.real.uptraining",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="of benchmarks.real (%(default)s)")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="%(default)s")
    parser.add_argument("--starts", nargs="+", choices=tuple(METHODS), default=["mean", "fit-100"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[0, 131_072], help="to train on (default: 0 131072)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="of calibration and training (default: 0)")
    parser.add_argument("--objective", choices=OBJECTIVES, default=OBJECTIVES[0], help="(default: %(default)s)")
    parser.add_argument(
        "--learning-rate",
        type=float,
        help=f"at its height (default: {RATES['mean']} after mean pooling, {FITTED_RATE} after fit)",
    )
    options = parser.parse_args()
    folder = options.folder.expanduser()
    scored = argparse.Namespace(
        parts=("loss", "needle"),
        windows=[512],
        tokens=HELD_OUT_TOKENS,
        dtype="bfloat16",
        needle_lengths=LENGTHS,
        haystacks=4,
    )
    records = Records(options.output, Job._fields)
    records.begin("benchmarks.real.uptraining", HELD_OUT_TOKENS)
    known = records.model(SMOLLM2, model_folder(folder))
    bench = Bench(folder, known["weights"], scored)
    bench.measure(known.setdefault("scores", {}), None, records.write)
    bench.free()
    for seed in options.seeds:
        for tokens in options.tokens:
            for name in options.starts:
                job = Job(SMOLLM2, GROUPS, name, tokens, seed, options.objective)
                measure(job, bench, records, folder, options.learning_rate)


if __name__ == "__main__":
    main()
