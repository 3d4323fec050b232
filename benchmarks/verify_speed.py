"""`gqa-convert verify --no-logits` against reading both checkpoints, and against hashing them: processor time and memory.

    python -m benchmarks.verify_speed --output docs/results/verify.json

A Llama of Llama-2-7B's shapes with a few layers is converted from 32 to 8 K/V heads. In every round each contender reads
both folders once, from the page cache. Seconds are those of the process on all its threads, without what `import torch`
takes in the same round, which is given apart, as is the time on the clock; memory is the largest anonymous memory, which
mapped files do not count to. Modules are compiled beforehand, as they are after an installation.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from benchmarks.synthetic import make_llama

READ = """
import sys
block = bytearray(1 << 20)
for path in sys.argv[1:]:
    with open(path, "rb", buffering=0) as file:
        while file.readinto(block):
            pass
"""
HASH = """
import hashlib, sys
for path in sys.argv[1:]:
    with open(path, "rb") as file:
        hashlib.file_digest(file, "sha256").hexdigest()
"""


def cpu_seconds(command: list[str], environment: dict[str, str]) -> float:
    """A command's seconds of processor time."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    actions = [(os.POSIX_SPAWN_DUP2, nowhere, 1), (os.POSIX_SPAWN_DUP2, nowhere, 2)]
    child = os.posix_spawn(command[0], command, environment, file_actions=actions)
    _, status, usage = os.wait4(child, 0)
    os.close(nowhere)
    code = os.waitstatus_to_exitcode(status)
    if code:
        raise SystemExit(f"{' '.join(command)}: exit code {code}")
    return usage.ru_utime + usage.ru_stime


def anonymous(command: list[str]) -> int:
    """The bytes of a command's largest anonymous memory."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    seen = [0]

    def watch() -> None:
        while process.poll() is None:
            try:
                lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            except OSError:
                return
            seen.extend(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
            time.sleep(0.02)

    watcher = threading.Thread(target=watch)
    watcher.start()
    if process.wait():
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
    watcher.join()
    return max(seen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2, help="default: %(default)s, 1.3 GB")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of torch; default: %(default)s")
    parser.add_argument("--method", choices=("mean", "first", "factor"), default="mean", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--folder", type=Path, help="where to put the checkpoints")
    parser.add_argument("--output", type=Path, help="write the figures here as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        source, out = Path(scratch, "source"), Path(scratch, "out")
        make_llama(source, layers=options.layers)
        program = [sys.executable, "-m", "gqa_convert"]
        subprocess.run([*program, "convert", source, out, "-n", "8", "-m", options.method, "-q"], check=True)
        files = [str(path) for folder in (source, out) for path in sorted(folder.glob("*.safetensors"))]
        verify = [*program, "verify", str(out), "--source", str(source), "--no-logits"]
        commands = {
            "import torch": [sys.executable, "-c", "import torch"],
            "read": [sys.executable, "-c", READ, *files],
            "hash": [sys.executable, "-c", HASH, *files],
            "verify": verify,
        }
        runs: dict[str, list[float]] = {name: [] for name in commands}
        wall: dict[str, list[float]] = {name: [] for name in commands}
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment["OMP_NUM_THREADS"] = str(options.threads)
        environment["PYTHONPYCACHEPREFIX"] = str(Path(scratch, "compiled"))
        for command in commands.values():  # compiles modules and fills the page cache
            cpu_seconds(command, environment)
        for _ in range(options.rounds):
            for name, command in commands.items():
                began = time.perf_counter()
                runs[name].append(round(cpu_seconds(command, environment), 3))
                wall[name].append(round(time.perf_counter() - began, 3))
        nbytes, memory = sum(Path(file).stat().st_size for file in files), anonymous(verify)
    own = [whole - start for whole, start in zip(runs["verify"], runs["import torch"], strict=True)]
    report = {
        "command": " ".join(["python", "-m", "benchmarks.verify_speed", *sys.argv[1:]]),
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.release()}, Python {platform.python_version()}",
        "threads": options.threads,
        "load_average": os.getloadavg()[0],
        "bytes": nbytes,
        "cpu_seconds": runs,
        "wall_seconds": wall,
        "verify_per_gb": round(statistics.median(own) / nbytes * 1e9, 3),
        "verify_over_read": round(statistics.median(a / b for a, b in zip(own, runs["read"], strict=True)), 2),
        "verify_over_hash": round(statistics.median(a / b for a, b in zip(own, runs["hash"], strict=True)), 2),
        "anonymous_bytes": memory,
    }
    print(json.dumps(report, indent=1))
    if options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
