"""What `gqa-convert` needs before any work: `--help`, mistakes, and plans of large checkpoints. Processor time and memory.

    python -m benchmarks.plan_speed --output docs/results/plan-cpu.json

The checkpoints consist of headers alone, in files without content: a Llama of 70B parameters in 15 files, and a Mixtral
of 100,000 tensors. Every command runs in a process of its own. Seconds are those of the process on its cores, user and
system, which other work on the machine lengthens a little but does not add to; memory is the largest resident set. The
first line, an interpreter that imports numpy, is what to compare with.
"""

import argparse
import json
import os
import platform
import shlex
import shutil
import statistics
import sys
import tempfile
from multiprocessing import Process
from pathlib import Path
from typing import Any

LLAMA_70B = {"layers": 80, "hidden": 8192, "intermediate": 28672, "heads": 64, "shard_bytes": 10_600_000_000}
EXPERTS = {"layers": 80, "hidden": 1024, "intermediate": 256, "heads": 16, "experts": 416, "shard_bytes": 3_000_000_000}


def make(folder: Path, sizes: dict[str, int]) -> None:
    """Write the headers of a checkpoint, and the tokenizer of the demo's, so that its default method reads text."""
    import gqa_convert
    from benchmarks.synthetic import make_llama

    make_llama(folder, **sizes, sparse=True)
    shutil.copy(Path(gqa_convert.__file__).parent / "demo_checkpoint" / "tokenizer.json", folder)


def measured(command: list[str], environment: dict[str, str], code: int = 0) -> tuple[float, int]:
    """Run a command; return its seconds of processor time and the bytes of its largest resident set."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    actions = [(os.POSIX_SPAWN_DUP2, nowhere, 1), (os.POSIX_SPAWN_DUP2, nowhere, 2)]
    child = os.posix_spawn(command[0], command, environment, file_actions=actions)
    _, status, usage = os.wait4(child, 0)
    os.close(nowhere)
    if os.waitstatus_to_exitcode(status) != code:
        raise SystemExit(f"{' '.join(command)}: exit code {os.waitstatus_to_exitcode(status)}")
    return usage.ru_utime + usage.ru_stime, 1024 * usage.ru_maxrss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="default: %(default)s")
    parser.add_argument("--folder", type=Path, help="where to put the headers")
    parser.add_argument("--only", metavar="CASE", help="measure one case, and keep the others of the output file")
    parser.add_argument("--output", type=Path, help="write the figures here as JSON")
    options = parser.parse_args()
    program = [sys.executable, "-m", "gqa_convert"]
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        llama, mixtral = Path(scratch, "llama-70b"), Path(scratch, "mixtral-100k")
        for folder, sizes in ((llama, LLAMA_70B), (mixtral, EXPERTS)):
            maker = Process(target=make, args=(folder, sizes))  # a child counts the memory of its parent at its start
            maker.start()
            maker.join()
        cases = {
            "python": ([sys.executable, "-c", "pass"], 0),
            "python, numpy": ([sys.executable, "-c", "import numpy"], 0),
            "--version": ([*program, "--version"], 0),
            "--help": ([*program, "--help"], 0),
            "convert --help": ([*program, "convert", "--help"], 0),
            "an unknown option": ([*program, "plan", "--gruops", "8"], 2),
            "a missing argument": ([*program, "plan"], 2),
            "plan, 70B, mean": ([*program, "plan", str(llama), "--groups", "8", "--method", "mean"], 0),
            "plan, 70B": ([*program, "plan", str(llama), "--groups", "8"], 0),
            "plan, 70B, fit": ([*program, "plan", str(llama), "--groups", "8", "--calibration", "text.txt"], 0),
            "plan, 5 layers": (
                [*program, "plan", "gqa_convert/demo_checkpoint", "--groups", "4", "--method", "mean"],
                0,
            ),
            "plan, 100,000 tensors": ([*program, "plan", str(mixtral), "--groups", "4", "--method", "mean"], 0),
        }
        if options.only is not None:
            cases = {options.only: cases[options.only]}
        environment = dict(os.environ, HF_HUB_OFFLINE="1")
        runs: dict[str, list[tuple[float, int]]] = {name: [] for name in cases}
        for _ in range(options.rounds):
            for name, (command, code) in cases.items():
                runs[name].append(measured(command, environment, code))
    report: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.plan_speed", *sys.argv[1:]]),
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.release()}, Python {platform.python_version()}",
        "load_average": os.getloadavg()[0],
        "cases": {
            name: {
                "cpu_seconds": {"min": min(seconds), "median": statistics.median(seconds), "max": max(seconds)},
                "resident_bytes": max(memory for _, memory in done),
            }
            for name, done in runs.items()
            for seconds in [[round(each, 3) for each, _ in done]]
        },
    }
    if options.only is not None and options.output:
        kept = json.loads(options.output.read_text(encoding="utf-8"))
        measured_alone = {key: report[key] for key in ("command", "load_average")}
        kept["cases"] |= {name: case | measured_alone for name, case in report["cases"].items()}
        report = kept
    for name, case in report["cases"].items():
        seconds = case["cpu_seconds"]
        print(f"{name:24} {seconds['median']:6.3f} s ({seconds['min']:.3f}) {case['resident_bytes'] / 2**20:7.1f} MiB")
    if options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
