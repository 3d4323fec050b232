"""N by layer against one N for all layers, at equal K/V bytes and equal calibration: what is left after `fit`.

    python -m benchmarks.budget --output docs/results/budget.json

The default is the bundled model at 50% and 25% of its K/V cache. Another one needs its texts:

    python -m benchmarks.budget MODEL --calibration TEXT --data HELD_OUT --budgets 50% --options "--kl-steps 0"

Each budget is converted by the command line with `--kv-budget`, with the largest `--groups` that fits (`uniform`), and
where layers have one of two numbers, with the larger one in as many layers, spread evenly over the depth (`even`): the
same bytes without measuring. All are evaluated against the source on held-out text. Conversions that are there already
are not made again.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.records import versions
from gqa_convert.demo import CHECKPOINT

OUTPUT = Path("docs/results/budget.json")
BESIDE = ("uniform", "even")
DEFAULT_FOLDER = Path("~/.cache/gqa-convert/budget")


def run(*words: str) -> dict[str, Any]:
    """The JSON object that a gqa-convert command prints."""
    command = [sys.executable, "-m", "gqa_convert", *words, "--json"]
    ended = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    if ended.returncode:
        sys.exit(f"{shlex.join(command)} ended with exit code {ended.returncode}")
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def converted(source: str, out: Path, groups: tuple[str, str], options: list[str]) -> dict[str, Any]:
    """A conversion's record: its K/V heads by layer, divergence by stage, and minutes."""
    record = out.with_suffix(".json")
    if not (out.is_dir() and record.is_file()):
        began = time.monotonic()
        report = run("convert", source, str(out), *groups, *options, "--overwrite")
        kept = {"report": report, "minutes": round((time.monotonic() - began) / 60, 1)}
        record.write_text(json.dumps(kept), encoding="utf-8")
    found: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
    return found


def as_option(groups: list[int]) -> str:
    """A list as `--groups` takes it."""
    return str(groups[0]) if len(set(groups)) == 1 else ",".join(map(str, groups))


def spread_evenly(groups: list[int]) -> list[int]:
    """The same two numbers as often, the larger one at equal distances."""
    larger, layers = groups.count(max(groups)), len(groups)
    places = {(2 * number + 1) * layers // (2 * larger) for number in range(larger)}
    return [max(groups) if place in places else min(groups) for place in range(layers)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(CHECKPOINT), help="the source (default: the bundled model)")
    parser.add_argument("--name", default="bundled model", help="of the source in the results (default: %(default)s)")
    parser.add_argument("--calibration", default="python-stdlib")
    parser.add_argument("--data", nargs="+", default=["python-stdlib:held-out"], help="held-out texts")
    parser.add_argument("--tokens", type=int, default=16384, help="of each held-out text (default: %(default)s)")
    parser.add_argument("--budgets", nargs="+", default=["50%", "25%"], help="shares of the source's K/V bytes")
    parser.add_argument(
        "--beside", nargs="+", choices=BESIDE, default=list(BESIDE), help="what the list is compared with"
    )
    parser.add_argument("--options", default="", help="further options of convert")
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="for the results (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="default: %(default)s")
    arguments = parser.parse_args()
    folder = arguments.folder.expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    options = ["--calibration", arguments.calibration, *shlex.split(arguments.options)]
    file = json.loads(arguments.output.read_text(encoding="utf-8")) if arguments.output.is_file() else {"cells": []}
    for budget in arguments.budgets:
        name = re.sub(r"\W+", "-", f"{arguments.name} {budget}")
        layered = converted(arguments.model, folder / f"{name}list", ("--kv-budget", budget), options)
        choice = layered["report"]["budget"]
        uniform = next(each for each in choice["candidates"] if each["rule"] == "uniform")
        lists = {"uniform": uniform["groups"]} if "uniform" in arguments.beside else {}
        if "even" in arguments.beside and isinstance(choice["groups"], list) and len(set(choice["groups"])) == 2:
            lists["even"] = spread_evenly(choice["groups"])
        made = {"list": layered} | {
            kind: converted(arguments.model, folder / f"{name}{kind}", ("--groups", as_option(groups)), options)
            for kind, groups in lists.items()
        }
        for kind, conversion in made.items():
            cell: dict[str, Any] = {"model": arguments.name, "budget": budget, "kind": kind}
            cell["minutes"] = conversion["minutes"]
            cell["options"] = arguments.options
            cell["groups"] = lists.get(kind, choice["groups"])
            cell["kv_bytes_per_token"] = conversion["report"]["kv_bytes_per_token"]
            for data in arguments.data:
                found = run(
                    *("evaluate", str(folder / f"{name}{kind}"), "--reference", arguments.model),
                    *("--data", data, "--tokens", str(arguments.tokens)),
                )
                (score,) = found["results"]
                kept = {"loss": score["loss"], "kl": score["kl"], "loss_added": score["difference"]["loss"]}
                cell.setdefault("scores", {})[Path(data).name] = kept
            keys = ("model", "budget", "kind")
            file["cells"] = [other for other in file["cells"] if any(other[key] != cell[key] for key in keys)] + [cell]
            file["versions"] = versions()
            arguments.output.write_text(json.dumps(file, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
