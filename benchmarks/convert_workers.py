"""`convert --workers K`: processor time and memory of all processes together, per gigabyte that is read and written.

    python -m benchmarks.convert_workers --output docs/results/convert-workers.json

A Llama of Llama-2-7B's shapes with a few layers, in files of 300 MB, is pooled from 32 to 8 K/V heads from the page cache.
Seconds are those of the processes on their cores, user and system, which other work on the machine lengthens but does not
add to. Memory is that of the largest process, and includes what all share.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.plan_speed import measured

MAKE = """
import sys
from pathlib import Path
from benchmarks.synthetic import make_llama
make_llama(Path(sys.argv[1]), layers=int(sys.argv[2]), shard_bytes=300_000_000)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2, help="default: %(default)s, 1.3 GB")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4], help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--folder", type=Path, help="where to work")
    parser.add_argument("--output", type=Path, help="write the figures here as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        source, out = Path(scratch, "source"), Path(scratch, "out")
        here = {**os.environ, "PYTHONPATH": f"{Path(__file__).parents[1]}:{os.environ.get('PYTHONPATH', '')}"}
        subprocess.run([sys.executable, "-c", MAKE, str(source), str(options.layers)], check=True, env=here)
        convert = [sys.executable, "-m", "gqa_convert", "convert", str(source), str(out), "-n", "8", "-m", "mean", "-q"]
        runs: dict[int, list[tuple[float, int]]] = {count: [] for count in options.workers}
        moved = sum(path.stat().st_size for path in source.iterdir())
        for _ in range(options.rounds):
            for count, done in runs.items():
                done.append(measured([*convert, "--workers", str(count)], dict(os.environ)))
                written = sum(path.stat().st_size for path in out.iterdir())
                shutil.rmtree(out)
    report = {
        "command": " ".join(["python", "-m", "benchmarks.convert_workers", *sys.argv[1:]]),
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.release()}, Python {platform.python_version()}",
        "load_average": os.getloadavg()[0],
        "bytes": {"read": moved, "written": written},
        "workers": {
            str(count): {
                "cpu_seconds": [round(seconds, 3) for seconds, _ in done],
                "per_gb": round(statistics.median(seconds for seconds, _ in done) / (moved + written) * 1e9, 3),
                "resident_bytes": max(memory for _, memory in done),
            }
            for count, done in runs.items()
        },
    }
    print(json.dumps(report, indent=1))
    if options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
