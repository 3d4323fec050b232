"""Conversion against `cp -r` of the same folder, and against loading the model: time and memory of whole commands.

    python benchmarks/convert_speed.py --layers 4 --rounds 10 --peer --output docs/results/convert-2gb.json    (2 GB)
    python benchmarks/convert_speed.py --layers 32 --rounds 3 --peer --output docs/results/convert-13gb.json   (13 GB)

Every round runs each contender once, in an order that alternates, from a warm and from a cold page cache; every file is
on the disk before the clock stops, `cp`'s too. The figure to read is the ratio within a round: absolute times mean
nothing on a shared machine. Beside the time stand what explains it: processor seconds, bytes moved, and the time until
the first weight file exists. `bare copy` writes the bytes of the result from the source's pages to the disk in large
aligned requests and does nothing else, which is as fast as this machine's disk lets any of the others be. Modules are
compiled beforehand, as they are after an installation.
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

BARE_COPY = """
import mmap, os, sys, threading
source, out, left = sys.argv[1], sys.argv[2], int(sys.argv[3])
os.mkdir(out)
step, jobs = 4 << 20, []
for name in sorted(name for name in os.listdir(source) if name.endswith(".safetensors")):
    nbytes = min(os.path.getsize(os.path.join(source, name)), left) // 4096 * 4096
    left -= nbytes
    if not nbytes:
        continue
    pages = memoryview(mmap.mmap(os.open(os.path.join(source, name), os.O_RDONLY), 0, prot=mmap.PROT_READ))
    into = os.open(os.path.join(out, name), os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    os.posix_fallocate(into, 0, nbytes)
    jobs += [(into, pages[at : min(at + step, nbytes)], at) for at in range(0, nbytes, step)]
waiting = iter(jobs)
lock = threading.Lock()
def work():
    while True:
        with lock:
            job = next(waiting, None)
        if job is None:
            return
        into, view, at = job
        while view:
            done = os.pwritev(into, [view], at)
            view, at = view[done:], at + done
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
for into in {job[0] for job in jobs}:
    os.fsync(into)
"""


class Measured:
    """What a command took.

    Attributes:
        seconds: of wall time.
        cpu_seconds: of its processes, user and system.
        read_bytes, written_bytes: what they read from the disk and handed to it or to the page cache.
        first_file_seconds: until the first weight file of the result existed.
        peak_anonymous: the largest anonymous memory of the process, in bytes.
    """

    def __init__(self, command: list[str], out: Path) -> None:
        self.peak_anonymous = 0
        self.first_file_seconds: float | None = None
        self._began = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        watcher = threading.Thread(target=self._watch, args=(process.pid, out))
        watcher.start()
        _, status, usage = os.wait4(process.pid, 0)
        self.seconds = time.perf_counter() - self._began
        process.returncode = os.waitstatus_to_exitcode(status)
        watcher.join()
        self.cpu_seconds = usage.ru_utime + usage.ru_stime
        self.read_bytes, self.written_bytes = 512 * usage.ru_inblock, 512 * usage.ru_oublock
        if process.returncode:
            raise SystemExit(f"{command[0]} failed with exit code {process.returncode}")

    def _watch(self, pid: int, out: Path) -> None:
        while True:
            try:
                status = Path(f"/proc/{pid}/status").read_text()
            except OSError:
                return
            lines = [line for line in status.splitlines() if line.startswith("RssAnon")]
            if not lines:
                return
            self.peak_anonymous = max(self.peak_anonymous, 1024 * int(lines[0].split()[1]))
            if self.first_file_seconds is None and any(
                file for folder in out.parent.glob(f"*{out.name}*") for file in folder.glob("*.safetensors")
            ):
                self.first_file_seconds = round(time.perf_counter() - self._began, 3)
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


def contenders(source: Path, out: Path, peer: bool, nbytes: int, copy: str = "cp -r") -> dict[str, list[str]]:
    """The commands by name; the bare copy writes `nbytes`, and `copy` is what `cp` is called with."""
    convert = [
        sys.executable,
        "-m",
        "gqa_convert",
        "convert",
        str(source),
        str(out),
        "--groups",
        str(GROUPS),
        "--method",
        "mean",
        "-q",
    ]
    commands = {
        "cp": ["sh", "-c", f"{copy} '{source}' '{out}' && sync '{out}'/* '{out}'"],
        "gqa-convert": convert,
        "bare copy": [sys.executable, "-S", "-c", BARE_COPY, str(source), str(out), str(nbytes)],
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
    parser.add_argument(
        "--cp-copies",
        action="store_true",
        help="let cp copy what it could share: from coreutils 9 on it shares all blocks where the filesystem can",
    )
    parser.add_argument("--folder", type=Path, default=None, help="where to work (on the disk to measure)")
    parser.add_argument("--output", type=Path, default=None, help="write the figures here as JSON")
    arguments = parser.parse_args()
    states = arguments.cache or ["warm", "cold"]
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        source, out = Path(scratch, "source"), Path(scratch, "out")
        nbytes = make_llama(source, layers=arguments.layers)
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = str(Path(scratch, "compiled"))
        subprocess.run(contenders(source, out, peer=False, nbytes=0)["gqa-convert"], check=True)
        converted = sum(path.stat().st_size for path in out.glob("*.safetensors"))
        shutil.rmtree(out)
        copy = "cp -r --reflink=never" if arguments.cp_copies else "cp -r"
        commands = contenders(source, out, arguments.peer, converted, copy)
        runs: list[dict[str, object]] = []
        for cache in states:
            for round_number in range(arguments.rounds):
                names = [name for name in commands if name != "from_pretrained" or round_number == 0]
                for name in names if round_number % 2 == 0 else reversed(names):
                    (warm if cache == "warm" else evict)(source)
                    os.sync()
                    measured = Measured(commands[name], out)
                    shutil.rmtree(out)
                    runs.append(
                        {
                            "cache": cache,
                            "round": round_number,
                            "name": name,
                            "seconds": round(measured.seconds, 3),
                            "cpu_seconds": round(measured.cpu_seconds, 3),
                            "first_file_seconds": measured.first_file_seconds,
                            "read_bytes": measured.read_bytes,
                            "written_bytes": measured.written_bytes,
                            "peak_anonymous_bytes": measured.peak_anonymous,
                        }
                    )
                    print(
                        f"{cache} {round_number} {name:<16} {measured.seconds:7.2f} s  {measured.cpu_seconds:6.2f} CPU s  {measured.peak_anonymous / 2**20:7.1f} MiB",
                        flush=True,
                    )
    report = {
        "command": " ".join(["python", *sys.argv]),
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.release()}, Python {platform.python_version()}",
        "load_average": os.getloadavg()[0],
        "source_bytes": nbytes,
        "converted_bytes": converted,
        "ratios_to_cp": {
            f"{cache} {name}": ratios(runs, cache, name) for cache in states for name in commands if name != "cp"
        },
        "medians": {f"{cache} {name}": medians(runs, cache, name) for cache in states for name in commands},
        "runs": runs,
    }
    print(json.dumps({key: report[key] for key in ("ratios_to_cp", "medians")}, indent=2))
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")


def ratios(runs: list[dict[str, object]], cache: str, name: str) -> dict[str, float]:
    """Minimum, median and maximum over the rounds of time divided by cp's time in the same round."""
    seconds = {(run["round"], run["name"]): float(str(run["seconds"])) for run in runs if run["cache"] == cache}
    values = [value / seconds[number, "cp"] for (number, contender), value in seconds.items() if contender == name]
    return {"min": round(min(values), 3), "median": round(statistics.median(values), 3), "max": round(max(values), 3)}


def medians(runs: list[dict[str, object]], cache: str, name: str) -> dict[str, float]:
    """The medians over the rounds of what was measured of one contender."""
    own = [run for run in runs if run["cache"] == cache and run["name"] == name]
    keys = ("seconds", "cpu_seconds", "first_file_seconds", "read_bytes", "written_bytes", "peak_anonymous_bytes")
    known = {key: [float(str(run[key])) for run in own if run[key] is not None] for key in keys}
    return {key: round(statistics.median(values), 3) for key, values in known.items() if values}


if __name__ == "__main__":
    main()
