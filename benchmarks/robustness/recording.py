"""The counts of all runs, in a JSON file."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from benchmarks.records import versions
from benchmarks.robustness.outcomes import Counts, KillOutcome, Outcome

KINDS: dict[str, tuple[type[Outcome] | type[KillOutcome], str]] = {
    "mutations": (Outcome, "mutated"),
    "kills": (KillOutcome, "killed"),
    "surroundings": (Outcome, "surrounding"),
}
"""What is counted: its outcomes, and the header of its table's first column."""
_PLACES = ("--folder", "--output")
"""Options that name a place on one machine."""


def record(path: Path, kind: str, seed: int, found: Counts) -> None:
    """Add the counts of a run, in place of those that an earlier one found with the same seed."""
    content: dict[str, Any] = {"runs": []}
    if path.is_file():
        content = json.loads(path.read_text(encoding="utf-8"))
    for run in content["runs"]:
        if (run["kind"], run["seed"]) == (kind, seed):
            run["counts"] = {subject: row for subject, row in run["counts"].items() if subject not in found}
    content["runs"] = [run for run in content["runs"] if run["counts"]]
    content["runs"].append({"kind": kind, "seed": seed, "command": _command(), "versions": versions(), "counts": found})
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _command() -> str:
    given = sys.argv[1:]
    for option in _PLACES:
        if option in given:
            del given[given.index(option) : given.index(option) + 2]
    return shlex.join(["python", "-m", "benchmarks.robustness", *given])
