"""Run the cases and print the tables; exit with 1 if there was a bug."""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from benchmarks.robustness.kills import run_kills
from benchmarks.robustness.mutations import run_mutations
from benchmarks.robustness.outcomes import BUGS, Case, KillOutcome, Outcome, counted
from benchmarks.robustness.surroundings import run_surroundings


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.robustness", description=__doc__)
    parser.add_argument("--mutations", type=int, default=0, metavar="N", help="mutated inputs, over all subjects")
    parser.add_argument("--kills", type=int, default=0, metavar="N", help="kills of each writing command")
    parser.add_argument("--surroundings", action="store_true", help="full disks, closed pipes and the like; as root")
    parser.add_argument("--only", metavar="NAME", help="one subject, one command, or one mutation by its number")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where files are written meanwhile; default: a temporary folder")
    return parser.parse_args()


def _collected(cases: Iterable[Case]) -> list[Case]:
    """All cases; every bug is printed when it is found."""
    found = []
    for case in cases:
        found.append(case)
        if case.outcome in BUGS:
            print(f"{case.subject}, {case.name}: {case.outcome}\n{case.detail}\n", file=sys.stderr, flush=True)
    return found


def main() -> int:
    """The exit status."""
    options = _arguments()
    found: list[Case] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        if options.kills:  # before this process starts a thread, since the killed ones are its forks
            killed = _collected(run_kills(options.kills, options.seed, folder, options.only))
            print(counted(killed, KillOutcome, "killed"))
            found += killed
        if options.surroundings:
            tried = _collected(run_surroundings(folder, options.only))
            print(counted(tried, Outcome, "surrounding"))
            found += tried
        if options.mutations:
            os.fsync = lambda fd: None  # the mutations are not about crashes of the machine
            mutated = _collected(run_mutations(options.mutations, options.seed, folder, options.only))
            print(counted(mutated, Outcome, "mutated"))
            found += mutated
    return 1 if any(case.outcome in BUGS for case in found) else 0


if __name__ == "__main__":
    sys.exit(main())
