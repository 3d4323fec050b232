"""`convert --method fit` of layers of any size: seconds per layer by the clock and on a core, and peak memory.

    python benchmarks/fit_scale.py --folder DISK --output docs/results/fit-scale.json     (two of Llama-2-7B's layers)

A checkpoint with random weights is converted from 32 heads to 8 by the command line, on one thread, without the last
stage. `--package` names the folder of another version of the package, and may be repeated: each version converts the
same checkpoint with the same text. Random weights make a fit no easier and no harder to compute than real ones.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from synthetic import make_llama

HERE = Path(__file__).parent.parent
TOKENIZER = HERE / "gqa_convert" / "demo_checkpoint"


def write_source(folder: Path, layers: int, hidden: int) -> None:
    """A checkpoint of the width of Llama-2, with the tokenizer of the bundled model."""
    make_llama(
        folder, layers=layers, hidden=hidden, intermediate=hidden * 43 // 16, heads=hidden // 128, deviation=0.02
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder / name)


def convert(package: Path, source: Path, out: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Convert with a version of the package; its times and memory."""
    command = [sys.executable, "-m", "gqa_convert", "convert", str(source), str(out), "--groups", "8"]
    command += ["--calibration", str(options.text), "--calibration-tokens", str(options.tokens)]
    command += ["--fit-steps", str(options.steps), "--kl-steps", "0", "--json"]
    environment = os.environ | {"PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"}
    began = time.perf_counter()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    told = [(round(time.perf_counter() - began, 1), line) for line in process.stderr]
    finished = [seconds for seconds, line in told if line.startswith("layer ") and "error remains" in line]
    _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status):
        raise SystemExit(f"{package}: the conversion failed\n{told[-1][1]}")
    return {
        "seconds": round(time.perf_counter() - began, 1),
        "core_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "seconds_until_layer": finished,
        "peak_gb": round(usage.ru_maxrss * 1024 / 1e9, 2),
    }


def main() -> None:
    """Measure each version once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, action="append", help="folder of a version (default: this one)")
    parser.add_argument("--text", type=Path, required=True, help="calibration text")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--folder", type=Path, help="for the checkpoints, on a disk with room")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    versions = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        source = Path(folder, "source")
        write_source(source, options.layers, options.hidden)
        for package in options.package or [HERE]:
            out = Path(folder, "out")
            versions[str(package)] = convert(package, source, out, options)
            shutil.rmtree(out)
            print(package, versions[str(package)], flush=True)
    settings = {name: getattr(options, name) for name in ("layers", "hidden", "tokens", "steps")}
    report = settings | {"processor": platform.processor() or platform.machine(), "versions": versions}
    if options.output:
        options.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
