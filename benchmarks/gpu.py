"""Measures on one GPU, in some minutes, what is claimed or estimated for GPUs.

    python benchmarks/gpu.py --folder DISK --output docs/results/gpu.json python benchmarks/gpu.py
    --folder DISK --small            (tiny models: whether the script works, on a CPU too)

What can be is measured on the command line itself, in processes of their own. Weights are random,
which makes a model no easier to compute. A part or a command that fails leaves its error in the
result, and the next one runs.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.benchmark import Timer

HERE = Path(__file__).parent.parent
sys.path.insert(0, str(HERE))

from benchmarks.synthetic import make_llama  # noqa: E402  # the script runs from any folder
from gqa_convert.attention import grouped_query_attention  # noqa: E402
from gqa_convert.conversion.options import BATCH_TOKENS, CalibrationOptions, ConversionOptions  # noqa: E402
from gqa_convert.conversion.progress import FitProgress  # noqa: E402
from gqa_convert.conversion.run import convert_checkpoint  # noqa: E402

DEMO = HERE / "gqa_convert" / "demo_checkpoint"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ADAPTERS = {
    "all weights": None,
    "adapters": "{rank: 64}",
    "adapters on weights in 4 bits": "{rank: 64, quantize: nf4}",
}
"""What `uptrain` trains, and the recipe's key `lora` for it."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Where and at what size to measure.

    Attributes:
        folder: for checkpoints; it is deleted afterwards.
        small: whether tiny sizes are measured, by which only the script is tried.
        timeout: the seconds after which a command is ended.
    """

    folder: Path
    small: bool
    timeout: float


def run(settings: Settings, *command: str | Path) -> dict[str, Any]:
    """Run a command of gqa-convert.

    Returns:
        `seconds` from its start to its end; `peak_gb`, the most memory of the GPU in use beyond
        what was in use before, or on a CPU the largest resident size; `result`, its JSON; and
        `error` where it failed.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as messages:
        before = used_bytes()
        began = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "gqa_convert", *map(str, command), "--json"],
            cwd=HERE,
            env=os.environ
            | {"HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(settings.folder / "cache")},
            stdout=output,
            stderr=messages,
            start_new_session=True,
        )
        peak, timed_out = before, False
        while True:
            ended, status, usage = os.wait4(process.pid, os.WNOHANG)
            if ended:
                break
            peak = max(peak, used_bytes())
            if time.perf_counter() - began > settings.timeout:
                timed_out = True
                os.killpg(process.pid, signal.SIGKILL)
            time.sleep(0.02)
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        messages.seek(0)
        written, said = output.read(), messages.read()
    used = peak - before if DEVICE == "cuda" else 1024 * usage.ru_maxrss
    found: dict[str, Any] = {"seconds": round(seconds, 1), "peak_gb": round(used / 1e9, 2)}
    if process.returncode != 0:
        found["exit_code"] = process.returncode
        found["error"] = (written + said).splitlines()[-12:]
        if timed_out:
            found["error"].append(f"ended after {settings.timeout:.0f} s")
    else:
        found["result"] = json.loads(written)
        found["result"].pop("changes", None)  # each tensor of a conversion
    return found


def used_bytes() -> int:
    """Memory of the GPU in use, by all processes; 0 on a CPU."""
    if DEVICE == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def make_source(folder: Path, *, layers: int, hidden: int) -> Path:
    """A Llama of heads of 128 with random weights and the bundled tokenizer."""
    make_llama(
        folder,
        layers=layers,
        hidden=hidden,
        intermediate=hidden * 43 // 16,
        heads=hidden // 128,
        deviation=0.02,
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / name)
    return folder


def measure_attention(settings: Settings) -> list[dict[str, Any]]:
    """Milliseconds of one call in a decoding step of 32 query heads of 128 in bfloat16, on 4,096
    keys.

    `gqa` is this package's function, `sdpa` torch's with `enable_gqa`, and `repeated` torch's on
    repeated heads.
    """
    found = []
    for batch in (1,) if settings.small else (1, 32):
        for kv_heads in (32, 8, 4, 1):
            query = torch.randn(batch, 32, 1, 128, dtype=torch.bfloat16, device=DEVICE)
            keys = torch.randn(
                2, batch, kv_heads, 64 if settings.small else 4096, 128, dtype=torch.bfloat16
            )
            key, value = keys.to(DEVICE)
            found.append(
                {"batch": batch, "kv_heads": kv_heads, **time_attention(query, key, value)}
            )
    return found


def time_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> dict[str, float]:
    """Milliseconds of each way to compute attention of queries [b, H, 1, c], keys and values [b,
    N, k, c].
    """
    sdpa = torch.nn.functional.scaled_dot_product_attention
    repeats = query.shape[1] // key.shape[1]

    calls: dict[str, Callable[[], object]] = {
        "gqa": lambda: grouped_query_attention(query, key, value),
        "sdpa": lambda: sdpa(query, key, value, enable_gqa=True),
        "repeated": lambda: sdpa(
            query, key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        ),
    }
    return {name: milliseconds(call) for name, call in calls.items()}


def milliseconds(call: Callable[[], object]) -> float:
    """The least of five mean times of ten calls each, after a warm-up."""
    timer = Timer("call()", globals={"call": call})
    with torch.inference_mode():
        means = [timer.timeit(10).mean for _ in range(6)]
    return float(round(1000 * min(means[1:]), 4))


def measure_decoding(settings: Settings) -> dict[str, Any]:
    """Decoding steps of a model of 7B's layers, with all K/V heads and with fewer."""
    if settings.small:
        source = make_source(settings.folder / "source", layers=1, hidden=512)
        return run(
            settings,
            "benchmark",
            source,
            "--candidates",
            "1,4",
            "--context",
            "64",
            "--repetitions",
            "1",
        )
    source = make_source(settings.folder / "source", layers=4, hidden=4096)
    return run(
        settings,
        "benchmark",
        source,
        "--candidates",
        "4,8,32",
        "--batch",
        "1,32",
        "--context",
        "4k",
    )


def measure_uptraining(settings: Settings) -> dict[str, Any]:
    """Tokens per second and memory of `uptrain` with the source as teacher, beside the memory
    that it estimates.
    """
    layers, hidden, kv_heads = (2, 512, 1) if settings.small else (8, 2048, 4)
    steps, length, batch = (3, 64, 2) if settings.small else (20, 2048, 4)
    source = make_source(settings.folder / "source", layers=layers, hidden=hidden)
    model = settings.folder / "model"
    found: dict[str, Any] = {
        "converting": run(
            settings, "convert", source, model, "--kv-heads", str(kv_heads), "--method", "mean"
        )
    }
    recipes = {}
    for name, lora in ADAPTERS.items():
        recipes[name] = settings.folder / f"{name}.yaml"
        lines = [
            f"model: {model}",
            f"teacher: {source}",
            f"output: {settings.folder / name}",
            "data: python-stdlib",
            f"sequence_length: {length}",
            f"micro_batch_size: {batch}",
            f"tokens_per_step: {length * batch}",
            f"tokens: {length * batch * steps}",
            "precision: bf16",
        ]
        if lora is not None:
            lines.append(f"lora: {lora}")
        recipes[name].write_text("\n".join(lines) + "\n")

    def dry_run(recipe: Path) -> dict[str, Any]:
        return run(settings, "uptrain", recipe, "--dry-run", "--hardware", "1xh100")

    with ThreadPoolExecutor() as pool:  # they compute nothing on the GPU
        estimates = list(pool.map(dry_run, recipes.values()))
    for (name, recipe), estimate in zip(recipes.items(), estimates, strict=True):
        trained = run(settings, "uptrain", recipe)
        found[name] = trained | {
            "estimate": estimate,
            **steps_taken(settings.folder / name / "metrics.jsonl"),
        }
        shutil.rmtree(settings.folder / name, ignore_errors=True)
    return found


def steps_taken(metrics: Path) -> dict[str, Any]:
    """The median rate of the second half of a run's steps, and the most memory that torch had
    allocated.
    """
    if not metrics.is_file():
        return {}
    lines = [json.loads(line) for line in metrics.open()]
    if not lines:
        return {}
    return {
        "tokens_per_second": statistics.median(
            line["tokens_per_second"] for line in lines[len(lines) // 2 :]
        ),
        "allocated_gb": max(line["peak_memory_gb"] for line in lines),
        "losses": [line["loss"] for line in (lines[0], lines[-1])],
    }


def measure_fit(settings: Settings) -> dict[str, Any]:
    """`fit` of the bundled model, proved by `verify`, and of one layer of Llama-2-7B's shapes;
    beside their estimates.
    """
    text: list[str | Path] = ["--calibration", "python-stdlib"]
    if settings.small:
        text += ["--calibration-tokens", "1k", "--fit-steps", "2"]
    fitted = settings.folder / "fitted"
    bundled = [
        "convert",
        DEMO,
        fitted,
        "--kv-heads",
        "3",
        *text,
        *(["--kl-steps", "2"] if settings.small else []),
    ]
    found = {
        "bundled model": run(settings, *bundled),
        "bundled model, dry run": run(settings, *bundled, "--dry-run"),
        "bundled model, verified": run(settings, "verify", fitted, "--source", DEMO),
    }
    layer = make_source(settings.folder / "layer", layers=1, hidden=512 if settings.small else 4096)
    kv_heads = 2 if settings.small else 8
    shaped = [
        "convert",
        layer,
        settings.folder / "none",
        "--kv-heads",
        str(kv_heads),
        *text,
        "--kl-steps",
        "0",
    ]
    found["one layer, dry run"] = run(settings, *shaped, "--dry-run")
    found["one layer"] = fit_layer(layer, settings.folder / "wide", kv_heads, small=settings.small)
    return found


def measure_last_stage(settings: Settings) -> dict[str, Any]:
    """The last stage of `fit` on a whole model of Llama-2-7B's shapes, and what its dry run
    estimates.

    Layers are merged in closed form, on little text, since only the stage behind them is measured.
    """
    layers, hidden, kv_heads, steps = (2, 512, 1, 2) if settings.small else (32, 4096, 8, 6)
    source = make_source(settings.folder / "whole", layers=layers, hidden=hidden)
    out = settings.folder / "stage"
    text = ["--calibration", "python-stdlib", "--calibration-tokens", "4k", "--no-mix"]
    text += ["--fit-steps", "0", "--kl-steps", str(steps), "--kv-heads", str(kv_heads)]
    found: dict[str, Any] = {"dry run": run(settings, "convert", source, out, *text, "--dry-run")}
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    taken: list[float] = []

    def note(progress: FitProgress) -> None:
        if progress.detail.startswith("step "):  # of the last stage
            taken.append(time.perf_counter())

    calibration = CalibrationOptions(
        source="python-stdlib", tokens=4096, mix=False, steps=0, kl_steps=steps
    )
    began = time.perf_counter()
    done = convert_checkpoint(
        source, out, kv_heads, ConversionOptions(calibration=calibration), on_layer=note
    )
    found["seconds"] = round(time.perf_counter() - began, 1)
    found["kl"] = asdict(done.calibration.kl) if done.calibration and done.calibration.kl else None
    between = [after - before for before, after in pairwise(taken[1:])]  # the first one begins it
    found["tokens_per_second"] = round(BATCH_TOKENS / statistics.median(between))
    if DEVICE == "cuda":
        found["allocated_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    return found


def fit_layer(source: Path, out: Path, kv_heads: int, *, small: bool) -> dict[str, Any]:
    """`fit` of a layer without the last stage, in this process: the seconds of each stage and
    torch's peak of memory.
    """
    stages: dict[str, float] = {}
    stage, began = "starting", time.perf_counter()

    def next_stage(progress: FitProgress) -> None:
        nonlocal stage, began
        now = time.perf_counter()
        stages[stage] = round(stages.get(stage, 0.0) + now - began, 2)
        words = progress.detail.rpartition(": ")[2].split(" of ")[0]
        stage, began = words.rstrip("0123456789, ") or progress.label or "writing", now

    calibration = CalibrationOptions(source="python-stdlib", kl_steps=0)
    if small:
        calibration = replace(calibration, tokens=1000, steps=2)
    done = convert_checkpoint(
        source, out, kv_heads, ConversionOptions(calibration=calibration), on_layer=next_stage
    )
    next_stage(FitProgress("", 0, 0))
    found = {
        "seconds": round(sum(stages.values()), 1),
        "stages": stages,
        "merge_error": dict(done.merge_error),
    }
    if DEVICE == "cuda":
        found["allocated_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    return found


PARTS: dict[str, Callable[[Settings], Any]] = {
    "attention": measure_attention,
    "decoding": measure_decoding,
    "uptraining": measure_uptraining,
    "fit": measure_fit,
    "last stage": measure_last_stage,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each part, and write what is there after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="for the checkpoints, on a disk with 15 GB; default: a temporary one",
    )
    parser.add_argument("--output", type=Path, help="JSON file to write, besides printing it")
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    parser.add_argument(
        "--timeout", type=float, default=100, help="seconds after which a command is ended"
    )
    parser.add_argument("--small", action="store_true", help="tiny models, in a minute on a CPU")
    options = parser.parse_args(arguments)
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {
        "command": " ".join(
            ["python", "benchmarks/gpu.py", *(sys.argv[1:] if arguments is None else arguments)]
        ),
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    for part in options.parts:
        began = time.perf_counter()
        try:
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                report[part] = PARTS[part](
                    Settings(folder=Path(folder), small=options.small, timeout=options.timeout)
                )
        except Exception:  # the other parts are measured all the same
            report[part] = {"error": traceback.format_exc().splitlines()[-12:]}
        print(f"{part}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        if options.output is not None:
            options.output.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
