"""What is claimed or estimated for one GPU, measured by the command line itself in some minutes.

    python benchmarks/gpu.py --folder DISK --output docs/results/gpu.json
    python benchmarks/gpu.py --folder DISK --small          (tiny models, on a CPU too: whether the script works)

Random weights make a model no easier to compute. Every part is a process of its own; `peak_gb` is the most memory of
the device that was in use beyond what was in use before, on a CPU the largest resident size.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers

HERE = Path(__file__).parent.parent
sys.path.insert(0, str(HERE))

from benchmarks.synthetic import make_llama  # noqa: E402  # the script runs from any folder

DEMO = HERE / "gqa_convert" / "demo_checkpoint"
RECIPES = {
    "all weights": [],
    "adapters": ["lora.rank=16"],
    "adapters on 4 bits": ["lora.rank=16", "lora.quantize=nf4"],
}
"""What `uptrain` trains, and the keys that say so."""


def run(command: list[str]) -> dict[str, Any]:
    """Run a command of gqa-convert; its seconds, its peak of memory and its JSON, or its error."""
    before = used_bytes()
    peak, done = [before], threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            peak.append(max(peak.pop(), used_bytes()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "gqa_convert", *command, "--json"],
        cwd=HERE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    written = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    done.set()
    watcher.join()
    used = peak[0] - before if torch.cuda.is_available() else usage.ru_maxrss * 1024
    result: dict[str, Any] = {"exit_code": os.waitstatus_to_exitcode(status)}
    with suppress(ValueError):
        result = json.loads(written)
    return {"seconds": round(seconds, 1), "peak_gb": round(used / 1e9, 2), "result": result}


def used_bytes() -> int:
    """Memory of the device in use, by all processes; 0 on a CPU."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def make_source(folder: Path, *, layers: int, hidden: int) -> Path:
    """A Llama of heads of 128 with random weights and the bundled tokenizer."""
    make_llama(
        folder, layers=layers, hidden=hidden, intermediate=hidden * 43 // 16, heads=hidden // 128, deviation=0.02
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / name)
    return folder


def measure_fit(folder: Path, small: bool) -> dict[str, Any]:
    """`fit` of the bundled model with its last stage, and of one layer of Llama-2-7B's shapes without it."""
    layer = make_source(folder / "layer", layers=1, hidden=512 if small else 4096)
    few = ["--calibration-tokens", "1k", "--fit-steps", "2"] if small else []
    demo = ["convert", str(DEMO), str(folder / "demo"), "--groups", "3", "--calibration", "python-stdlib", *few]
    wide = ["convert", str(layer), str(folder / "wide"), "--groups", "2" if small else "8", "--kl-steps", "0"]
    return {
        "bundled model": run([*demo, *(["--kl-steps", "2"] if small else [])]),
        "one layer": run([*wide, "--calibration", "python-stdlib", *few]),
    }


def measure_decoding(folder: Path, small: bool) -> dict[str, Any]:
    """Decoding steps with all K/V heads and with fewer."""
    source = make_source(folder / "decoded", layers=1 if small else 4, hidden=512 if small else 4096)
    size = ["--batch", "1", "--context", "64"] if small else ["--batch", "1,16", "--context", "4k"]
    return run(["benchmark", str(source), "--candidates", "1,4" if small else "4,8,32", *size])


def measure_uptraining(folder: Path, small: bool) -> dict[str, Any]:
    """Tokens per second and memory of `uptrain`, beside what its dry run estimates."""
    source = make_source(folder / "source", layers=2 if small else 8, hidden=256 if small else 2048)
    model = folder / "model"
    run(["convert", str(source), str(model), "--groups", "1" if small else "4", "--method", "mean"])
    steps, length, batch = (2, 64, 2) if small else (20, 2048, 4)
    found = {}
    for number, (name, keys) in enumerate(RECIPES.items()):
        output = folder / f"run-{number}"
        recipe = folder / f"recipe-{number}.yaml"
        lines = [f"model: {model}", f"teacher: {source}", f"output: {output}", "data: python-stdlib"]
        lines += [f"sequence_length: {length}", f"micro_batch_size: {batch}", f"tokens_per_step: {length * batch}"]
        lines += [f"tokens: {length * batch * steps}", "precision: bf16"]
        recipe.write_text("\n".join(lines) + "\n")
        trained = run(["uptrain", str(recipe), *keys])
        metrics = output / "metrics.jsonl"
        rates = [json.loads(line)["tokens_per_second"] for line in metrics.open()] if metrics.is_file() else []
        found[name] = trained | {
            "tokens_per_second": sorted(rates)[len(rates) // 2] if rates else None,
            "estimate": run(["uptrain", str(recipe), *keys, "--dry-run", "--hardware", "1x80GB"])["result"],
        }
        shutil.rmtree(output, ignore_errors=True)
    return found


PARTS: dict[str, Callable[[Path, bool], dict[str, Any]]] = {
    "fit": measure_fit,
    "decoding": measure_decoding,
    "uptraining": measure_uptraining,
}


def main() -> None:
    """Measure each part, and write what is there after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="for the checkpoints, on a disk with 10 GB")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    parser.add_argument("--small", action="store_true", help="tiny models, in a minute on a CPU")
    options = parser.parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    report: dict[str, Any] = {
        "device": device,
        "small": options.small,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    for part in options.parts:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            report[part] = PARTS[part](Path(folder), options.small)
        print(f"{part}: {time.perf_counter() - began:.0f} s", flush=True)
        if options.output:
            options.output.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
