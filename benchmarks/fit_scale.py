"""Calibrated merging (`--method fit`) of layers of any size: minutes per layer by stage, memory, and what the
arithmetic alone would take.

    python benchmarks/fit_scale.py --output docs/results/fit-scale-4.json                        (Llama-2-7B's shapes)
    python benchmarks/fit_scale.py --tokens 16384 --steps 4 --output docs/results/fit-scale-4.json  (a sample, scaled up
    to the defaults)

A random checkpoint is converted by the package's own code in a process of its own, with its weights left in the files
and what waits between layers spilled, as on a machine whose memory is smaller than the model. Each stage is timed
exclusively, by the clock and by the seconds that the process was on a core, which is the figure to read on a shared
machine. The bound of a stage is its multiplications and additions over the rate at which one core of this machine
multiplies matrices of the same width, measured before and after in the same run. With fewer tokens or steps than a
conversion would use, each stage is scaled by what it grows with, and said to be.
"""

import argparse
import itertools
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from synthetic import make_llama

from gqa_convert.conversion.options import CalibrationOptions, ConversionOptions

TOKENIZER = Path(__file__).parent.parent / "gqa_convert" / "demo_checkpoint"
STAGES = (
    "forward",
    "targets",
    "moments",
    "grouping",
    "low-frequency pairs",
    "merge",
    "regressions",
    "gradient steps",
    "errors",
)
SCALED = {
    "forward": "tokens",
    "targets": "tokens",
    "moments": "tokens",
    "regressions": "tokens",
    "errors": "tokens",
    "gradient steps": "steps",
}
"""What a stage grows with; the others have their full size in every run of at least 8192 tokens."""


class Clock:
    """Seconds by stage, without those of stages inside: by the clock, and on a core."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.core_seconds: dict[str, float] = {}
        self._stack: list[tuple[str, float, float]] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        began, on_core = time.perf_counter(), time.process_time()
        self._stack.append((name, 0.0, 0.0))
        try:
            yield
        finally:
            elapsed, spent = time.perf_counter() - began, time.process_time() - on_core
            _, inner, inner_spent = self._stack.pop()
            self.seconds[name] = self.seconds.get(name, 0.0) + elapsed - inner
            self.core_seconds[name] = self.core_seconds.get(name, 0.0) + spent - inner_spent
            if self._stack:
                outer, before, before_spent = self._stack[-1]
                self._stack[-1] = outer, before + elapsed, before_spent + spent

    def inside(self, name: str) -> bool:
        return any(other == name for other, _, _ in self._stack)

    def wrap(self, owner: Any, attribute: str, name: str, *, unless: str = "") -> None:
        ordinary: Callable[..., Any] = getattr(owner, attribute)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if unless and self.inside(unless):
                return ordinary(*args, **kwargs)
            with self.stage(name):
                return ordinary(*args, **kwargs)

        setattr(owner, attribute, timed)


def resident() -> dict[str, int]:
    """Bytes of this process: at its greatest, all and anonymous now."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: 1024 * int(lines[name].split()[0]) for name in ("VmHWM", "RssAnon", "RssFile", "RssShmem")}


class Watch:
    """The greatest anonymous memory, and in which stage it was: sampled."""

    def __init__(self, clock: Clock) -> None:
        self.anonymous, self.stage = 0, ""
        self.by_stage: dict[str, int] = {}
        self._clock, self._over = clock, threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while not self._over.wait(0.05):
            now = resident()["RssAnon"]
            stage = self._clock._stack[-1][0] if self._clock._stack else "between stages"
            self.by_stage[stage] = max(now, self.by_stage.get(stage, 0))
            if now > self.anonymous:
                self.anonymous, self.stage = now, stage

    def stop(self) -> None:
        self._over.set()


def gigaflops(width: int) -> dict[str, float]:
    """The rate of square products of this width, the best of three, in 10^9 multiplications and additions per second
    and core.
    """
    import torch

    found = {}
    for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32), ("float64", torch.float64)):
        left, right = (torch.randn(width, width, dtype=dtype) for _ in range(2))
        seconds = []
        for _ in range(3):
            began = time.process_time()
            left @ right
            seconds.append(time.process_time() - began)
        found[name] = 2 * width**3 / min(seconds) / 1e9
    return found


def work(options: argparse.Namespace, tokens: int, length: int) -> dict[str, float]:
    """Multiplications and additions of a layer by stage; those in float64 count twice.

    Attention alone has four projections and, for each token, scores and sums over the block (all of it: the mask saves
    nothing).
    """
    width, inner, heads = options.width, options.inner, options.heads * options.head_dim
    attention = 8 * width * heads + 4 * length * heads
    return {
        "forward": 2 * tokens * (attention + 6 * width * inner),
        "targets": 2 * tokens * attention,
        "moments": 2 * tokens * width**2,
        "regressions": 2 * (tokens * (attention + 2 * heads**2 + 2 * heads * width) + 5 * heads**3),
        "errors": tokens * attention,
        "gradient steps": 3 * options.steps * 2048 * attention,
    }


def child(options: argparse.Namespace) -> None:
    import torch

    from gqa_convert.conversion import run as convert
    from gqa_convert.conversion.fit import layer_fitting, model_loading, one_layer
    from gqa_convert.conversion.fit.layer_walk import LayerWalk, Stream
    from gqa_convert.conversion.fit.progress import FitProgress

    clock = Clock()
    fitting = one_layer.OneLayer
    clock.wrap(Stream, "advance", "forward")
    clock.wrap(LayerWalk, "__init__", "opening")
    clock.wrap(Stream, "attention", "targets")
    clock.wrap(one_layer, "moments_of", "moments")
    clock.wrap(fitting, "_first_low_frequency", "low-frequency pairs")
    clock.wrap(one_layer, "find_head_order", "grouping")
    clock.wrap(one_layer, "merge_layer", "merge", unless="low-frequency pairs")
    clock.wrap(fitting, "_repair", "regressions")
    clock.wrap(one_layer, "fit_gradient", "gradient steps")
    clock.wrap(fitting, "error", "errors")
    limit = None if options.in_memory else 0
    open_model = model_loading.open_model
    vars(model_loading)["open_model"] = lambda folder, device: open_model(folder, device=device, memory_limit=limit)
    if not options.in_memory:
        vars(layer_fitting)["is_large"] = lambda model, batches: True
    if options.threads:
        torch.set_num_threads(options.threads)
    rates = [gigaflops(options.width)]
    watch = Watch(clock)
    records: list[dict[str, Any]] = []
    layers: list[tuple[dict[str, float], dict[str, float]]] = [({}, {})]

    def on_layer(progress: FitProgress) -> None:
        if progress.layer is None:
            return
        layers.append((dict(clock.seconds), dict(clock.core_seconds)))
        records.append(asdict(progress.layer))
        print(
            json.dumps(records[-1]),
            {name: round(seconds, 1) for name, seconds in clock.core_seconds.items()},
            file=sys.stderr,
            flush=True,
        )

    summary = convert.convert_checkpoint(
        options.source,
        options.out,
        options.groups,
        ConversionOptions(
            calibration=CalibrationOptions(
                source="python-stdlib", tokens=options.tokens, sequence_length=options.length, steps=options.steps
            )
        ),
        on_layer=on_layer,
    )
    watch.stop()
    rates.append(gigaflops(options.width))
    assert summary.calibration is not None
    stages = [
        {
            name: (after[0][name] - before[0].get(name, 0.0), after[1][name] - before[1].get(name, 0.0))
            for name in after[0]
        }
        for before, after in itertools.pairwise(layers)
    ]
    result = {
        "stages": stages,
        "rates": rates,
        "threads": torch.get_num_threads(),
        "records": records,
        "calibration": {"tokens": summary.calibration.tokens},
        "memory": {
            "VmHWM": resident()["VmHWM"],
            "anonymous": watch.anonymous,
            "in_stage": watch.stage,
            "by_stage": watch.by_stage,
        },
        "cpu_seconds": sum(resource.getrusage(resource.RUSAGE_SELF)[:2]),
    }
    print(json.dumps(result))


def table(report: dict[str, Any]) -> str:
    """Markdown."""
    lines = [
        "| stage | measured, s | on a core, s | at full size, min | on a core, min | bound, core min |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name in STAGES:
        row = report["layer"][name]
        bound = "" if row["bound_minutes"] is None else f"{row['bound_minutes']:.1f}"
        figures = " | ".join(f"{row[key]:.1f}" for key in ("seconds", "core_seconds", "minutes", "core_minutes"))
        lines.append(f"| {name} | {figures} | {bound} |")
    total, core, least = (
        sum(row[key] or 0.0 for row in report["layer"].values()) for key in ("minutes", "core_minutes", "bound_minutes")
    )
    return "\n".join([*lines, f"| **a layer** | | | **{total:.1f}** | **{core:.1f}** | **{least:.1f}** |"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--layers", type=int, default=3, help="of the checkpoint; the second and later ones are reported"
    )
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--head-dim", type=int, default=0, help="default: width / heads")
    parser.add_argument("--inner", type=int, default=11008, help="width of the MLP")
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=None, help="of calibration text (default: as a conversion would)")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a block")
    parser.add_argument(
        "--steps",
        type=int,
        default=None,
        help="of the gradient stage, 2048 tokens each (default: as a conversion would)",
    )
    parser.add_argument("--threads", type=int, default=0, help="default: torch's")
    parser.add_argument(
        "--in-memory", action="store_true", help="as on a machine with memory for the whole model in float32"
    )
    parser.add_argument("--folder", type=Path, default=None, help="where to work")
    parser.add_argument("--source", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument(
        "--output", type=Path, default=None, help="write the figures here as JSON, and beside it as Markdown"
    )
    options = parser.parse_args()
    from gqa_convert.conversion.fit.options import STEPS
    from gqa_convert.text.calibration import calibration_tokens_for

    options.steps = STEPS if options.steps is None else options.steps
    options.head_dim = options.head_dim or options.width // options.heads
    if options.out:
        child(options)
        return
    full_tokens, full_steps = calibration_tokens_for({"hidden_size": options.width}), STEPS
    options.tokens = options.tokens or full_tokens
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        source = Path(scratch, "source")
        make_llama(
            source,
            layers=options.layers,
            hidden=options.width,
            intermediate=options.inner,
            heads=options.heads,
            vocabulary=options.vocabulary,
            deviation=0.02,
        )
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TOKENIZER / name, source / name)
        command = [sys.executable, __file__, *sys.argv[1:], "--tokens", str(options.tokens)]
        process = subprocess.run(
            [*command, "--source", str(source), "--out", str(Path(scratch, "out"))],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    found = json.loads(process.stdout.splitlines()[-1])
    rate = max(rates["bfloat16"] for rates in found["rates"])
    counted = found["calibration"]["tokens"]
    whole = work(argparse.Namespace(**vars(options) | {"steps": full_steps}), full_tokens, options.length)
    later = found["stages"][1:] or found["stages"]
    layer = {}
    for name in STAGES:
        seconds, spent = (sum(stage.get(name, (0.0, 0.0))[kind] for stage in later) / len(later) for kind in (0, 1))
        scale = {"tokens": full_tokens / counted, "steps": full_steps / max(1, options.steps)}.get(
            SCALED.get(name, ""), 1.0
        )
        bound = whole[name] / rate / 1e9 / 60 if name in whole else None
        layer[name] = {
            "seconds": seconds,
            "core_seconds": spent,
            "scaled_by": scale,
            "minutes": seconds * scale / 60,
            "core_minutes": spent * scale / 60,
            "bound_minutes": bound,
        }
    report = {
        "command": " ".join(["python", *sys.argv]),
        "machine": f"{os.cpu_count()} cores, {found['threads']} threads, load {os.getloadavg()[1]:.1f}, {platform.system()}, "
        f"Python {platform.python_version()}",
        "full_size": {"tokens": full_tokens, "steps": full_steps},
        "measured_size": {"tokens": counted, "steps": options.steps},
        "layer": layer,
        **found,
    }
    memory = found["memory"]
    shape = f"{options.width} wide, {options.heads} heads of {options.head_dim}, MLP {options.inner}"
    text = (
        f"# Fitting a layer: {shape}, to {options.groups} K/V heads\n\n"
        f"`{report['command']}`\n\nMachine: {report['machine']}; products of matrices {options.width} wide at {rate:.0f} GFLOP/s and core in bfloat16, from which the bounds follow.\n"
        f"Measured with {counted} tokens and {options.steps} steps; scaled linearly to {full_tokens} tokens and {full_steps} steps of 2048.\n\n"
        f"{table(report)}\n\nPeak anonymous memory {memory['anonymous'] / 2**30:.2f} GiB (in {memory['in_stage']}), peak resident with mapped files "
        f"{memory['VmHWM'] / 2**30:.2f} GiB. CPU seconds in all: {found['cpu_seconds']:.0f}.\n"
    )
    print(text)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(report, indent=2) + "\n")
        options.output.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
