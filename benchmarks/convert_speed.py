"""Conversion against `cp -r` of the same folder, and against loading the model: time and memory of whole commands.

    python benchmarks/convert_speed.py --layers 4 --rounds 5 --peer --output docs/results/convert-2gb.json     (2 GB)
    python benchmarks/convert_speed.py --layers 32 --rounds 3 --peer --output docs/results/convert-13gb.json   (13 GB)

Every round runs each contender once, in an order that alternates, from a warm and from a cold page cache; every file is
on the disk before the clock stops, `cp`'s too. The figure to read is the ratio within a round: absolute times mean
nothing on a shared machine.
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
import threading
import time
from pathlib import Path

from synthetic import make_llama

GROUPS = 8

# What a user would write instead: load everything, average the heads, save.
POOL_IN_MEMORY = """
import sys, torch
from transformers import AutoModelForCausalLM
source, out, groups = sys.argv[1], sys.argv[2], int(sys.argv[3])
model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
heads, width = model.config.num_attention_heads, model.model.layers[0].self_attn.head_dim
for layer in model.model.layers:
    for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
        merged = projection.weight.data.float().view(groups, heads // groups, width, -1).mean(1).flatten(0, 1)
        projection.weight = torch.nn.Parameter(merged.to(projection.weight.dtype))
model.config.num_key_value_heads = groups
model.save_pretrained(out)
"""


class Measured:
    """Wall time of a command, and the peak of the anonymous memory of its largest process in bytes."""

    def __init__(self, command: list[str]) -> None:
        self.peak_anonymous = 0
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        watcher = threading.Thread(target=self._watch, args=(process.pid,))
        watcher.start()
        code = process.wait()
        self.seconds = time.perf_counter() - began
        watcher.join()
        if code:
            raise SystemExit(f"{command[0]} failed with exit code {code}")

    def _watch(self, pid: int) -> None:
        while True:
            try:
                status = Path(f"/proc/{pid}/status").read_text()
            except OSError:
                return
            lines = [line for line in status.splitlines() if line.startswith("RssAnon")]
            if not lines:
                return
            self.peak_anonymous = max(self.peak_anonymous, 1024 * int(lines[0].split()[1]))
            time.sleep(0.005)


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


def contenders(source: Path, out: Path, peer: bool) -> dict[str, list[str]]:
    convert = [
        str(Path(sys.executable).with_name("gqa-convert")),
        "convert",
        str(source),
        str(out),
        "--groups",
        str(GROUPS),
        "-q",
    ]
    commands = {
        "cp": ["sh", "-c", f"cp -r '{source}' '{out}' && sync '{out}'/* '{out}'"],
        "gqa-convert": convert,
    }
    if peer:
        script = [sys.executable, "-c", POOL_IN_MEMORY, str(source), str(out), str(GROUPS)]
        quoted = " ".join(f"'{part}'" if index != 2 else '"$POOL"' for index, part in enumerate(script))
        os.environ["POOL"] = POOL_IN_MEMORY
        commands["from_pretrained"] = ["sh", "-c", f"exec {quoted}"]
    return commands


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4, help="4 make 2 GB, 32 make 13.5 GB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--peer",
        action="store_true",
        help="also time from_pretrained + pooling + save_pretrained, once per cache state",
    )
    parser.add_argument(
        "--cache", choices=("warm", "cold"), action="append", help="only this state of the page cache (default: both)"
    )
    parser.add_argument("--folder", type=Path, default=None, help="where to work (on the disk to measure)")
    parser.add_argument("--output", type=Path, default=None, help="write the figures here as JSON")
    arguments = parser.parse_args()
    states = arguments.cache or ["warm", "cold"]
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        source, out = Path(scratch, "source"), Path(scratch, "out")
        nbytes = make_llama(source, layers=arguments.layers)
        commands = contenders(source, out, arguments.peer)
        runs: list[dict[str, object]] = []
        for cache in states:
            for round_number in range(arguments.rounds):
                names = [name for name in commands if name != "from_pretrained" or round_number == 0]
                for name in names if round_number % 2 == 0 else reversed(names):
                    (warm if cache == "warm" else evict)(source)
                    os.sync()
                    measured = Measured(commands[name])
                    shutil.rmtree(out)
                    runs.append(
                        {
                            "cache": cache,
                            "round": round_number,
                            "name": name,
                            "seconds": round(measured.seconds, 3),
                            "peak_anonymous_bytes": measured.peak_anonymous,
                        }
                    )
                    print(
                        f"{cache} {round_number} {name:<16} {measured.seconds:7.2f} s  {measured.peak_anonymous / 2**20:7.1f} MiB",
                        flush=True,
                    )
    report = {
        "command": " ".join(["python", *sys.argv]),
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.release()}, Python {platform.python_version()}",
        "source_bytes": nbytes,
        "ratios_to_cp": {
            f"{cache} {name}": ratios(runs, cache, name) for cache in states for name in commands if name != "cp"
        },
        "runs": runs,
    }
    print(json.dumps(report["ratios_to_cp"], indent=2))
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")


def ratios(runs: list[dict[str, object]], cache: str, name: str) -> dict[str, float]:
    """Minimum, median and maximum over the rounds of time divided by cp's time in the same round."""
    seconds = {(run["round"], run["name"]): float(str(run["seconds"])) for run in runs if run["cache"] == cache}
    values = [value / seconds[number, "cp"] for (number, contender), value in seconds.items() if contender == name]
    return {"min": round(min(values), 3), "median": round(statistics.median(values), 3), "max": round(max(values), 3)}


if __name__ == "__main__":
    main()
