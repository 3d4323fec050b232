"""Conversion against `cp -r` of the same folder: time and memory of whole commands.

    python benchmarks/convert_speed.py --layers 4 --rounds 10 --output
    docs/results/convert-2gb-warm.json    (2 GB) python benchmarks/convert_speed.py --layers 32
    --rounds 3 --output docs/results/convert-13gb.json   (13 GB)

Every round runs each contender once, in an order that alternates, from a warm and from a cold page
cache; every file is on the disk before the clock stops, `cp`'s too. The figure to read is the ratio
within a round: absolute times mean nothing on a shared machine. Modules are compiled beforehand, as
they are after an installation.
"""

import argparse
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from synthetic import make_llama

KV_HEADS = "8"
CACHES = ["warm", "cold"]
KEYS = ("cache", "round", "name")
"""What tells runs apart."""


def measure(command: list[str]) -> dict[str, float]:
    """What a command took: seconds of time and of processors, bytes that it read from the disk and
    handed to it or to the page cache, and the largest anonymous memory of its process.
    """
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peak = 0
    while True:
        ended, status, usage = os.wait4(process.pid, os.WNOHANG)
        if ended:
            break
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        peak = max(
            [peak, *(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))]
        )
        time.sleep(0.002)
    seconds = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command[0]} failed with exit code {process.returncode}")
    return {
        "seconds": round(seconds, 3),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 3),
        "read_bytes": 512 * usage.ru_inblock,
        "written_bytes": 512 * usage.ru_oublock,
        "peak_anonymous_bytes": peak,
    }


def evict(folder: Path) -> None:
    """Drop a folder's pages from the page cache."""
    os.sync()
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def warm(folder: Path) -> None:
    for path in folder.iterdir():
        subprocess.run(["cat", str(path)], stdout=subprocess.DEVNULL, check=True)


def contenders(source: Path, out: Path) -> dict[str, list[str]]:
    """The commands by name."""
    convert = ["convert", str(source), str(out), "--kv-heads", KV_HEADS, "--method", "mean"]
    return {
        "cp": ["sh", "-c", f"cp -r --reflink=never '{source}' '{out}' && sync '{out}'/* '{out}'"],
        "gqa-convert": [sys.executable, "-m", "gqa_convert", *convert],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4, help="4 make 2 GB, 32 make 13.5 GB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--cache", choices=CACHES, nargs="+", default=CACHES, help="states of the page cache"
    )
    parser.add_argument("--folder", type=Path, help="where to work (on the disk to measure)")
    parser.add_argument("--output", type=Path, help="write the figures here as JSON")
    arguments = parser.parse_args()
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        source, out = Path(scratch, "source"), Path(scratch, "out")
        nbytes = make_llama(source, layers=arguments.layers)
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = str(Path(scratch, "compiled"))
        commands = contenders(source, out)
        subprocess.run(commands["gqa-convert"], check=True)
        shutil.rmtree(out)
        for cache, number in itertools.product(arguments.cache, range(arguments.rounds)):
            for name in commands if number % 2 == 0 else reversed(commands):
                (warm if cache == "warm" else evict)(source)
                os.sync()
                runs.append(
                    {"cache": cache, "round": number, "name": name, **measure(commands[name])}
                )
                shutil.rmtree(out)
                print(*runs[-1].values(), flush=True)
    pairs = list(itertools.product(arguments.cache, commands))
    report = {
        "command": " ".join(["python", *sys.argv]),
        "machine": (
            f"{os.cpu_count()} cores, {platform.system()} {platform.release()}, Python "
            f"{platform.python_version()}"
        ),
        "load_average": os.getloadavg()[0],
        "source_bytes": nbytes,
        "ratios_to_cp": {f"{cache} gqa-convert": ratios(runs, cache) for cache in arguments.cache},
        "medians": {f"{cache} {name}": medians(runs, cache, name) for cache, name in pairs},
        "runs": runs,
    }
    print(json.dumps({key: report[key] for key in ("ratios_to_cp", "medians")}, indent=2))
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")


def ratios(runs: list[dict[str, Any]], cache: str) -> dict[str, float]:
    """Minimum, median and maximum over the rounds of gqa-convert's time divided by cp's in the
    same round.
    """
    seconds = {(run["round"], run["name"]): run["seconds"] for run in runs if run["cache"] == cache}
    values = [
        seconds[number, "gqa-convert"] / seconds[number, "cp"]
        for number in {number for number, _ in seconds}
    ]
    return {
        "min": round(min(values), 3),
        "median": round(statistics.median(values), 3),
        "max": round(max(values), 3),
    }


def medians(runs: list[dict[str, Any]], cache: str, name: str) -> dict[str, float]:
    """The medians over the rounds of what was measured of one contender."""
    own = [run for run in runs if run["cache"] == cache and run["name"] == name]
    return {
        key: round(statistics.median(run[key] for run in own), 3)
        for key in own[0]
        if key not in KEYS
    }


if __name__ == "__main__":
    main()
