"""Writing commands that are killed at random moments and right before they touch files, and then run again."""

import os
import random
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.robustness.commands import Command, template, use_caches_in
from benchmarks.robustness.outcomes import Case, KillOutcome
from benchmarks.robustness.processes import Ended, Kill, import_modules, run_process
from benchmarks.robustness.sources import digests

Results = dict[str, str]
"""The content or the digest of each of the result's files."""


@dataclass(frozen=True, slots=True)
class Reference:
    """What a run does that nothing disturbs.

    Attributes:
        before: the results that lie in the folder already.
        whole: the results.
        files: all files and folders afterwards.
        seconds: how long it takes once all modules are imported.
        events: how often it touches files.
    """

    before: Results
    whole: Results
    files: frozenset[str]
    seconds: float
    events: int


def run_kills(number: int, seed: int, folder: Path, command: Command) -> Iterator[Case]:
    """Yield `number` cases of a command, whose files lie in `folder` meanwhile. Half of the kills come at a moment of the
    run, half at a file event, both drawn from the seed.
    """
    use_caches_in(folder)
    sync, os.fsync = os.fsync, lambda fd: None  # the kills are not about crashes of the machine
    original = template(folder / "template", command.prepared_by)
    reference = _reference(original, command)
    dice = random.Random(f"{seed} {command.name}")
    print(
        f"{command.name}: {reference.seconds:.1f} s and {reference.events} file events undisturbed",
        file=sys.stderr,
        flush=True,
    )
    for at in range(number):
        if at % 2:
            kill = Kill(event=dice.randint(1, reference.events))
        else:
            kill = Kill(seconds=dice.uniform(0, 1.1 * reference.seconds))
        yield _killed(original, command, reference, kill)
    shutil.rmtree(original)
    os.fsync = sync


def _reference(original: Path, command: Command) -> Reference:
    before = _results(original, command)
    made: list[Results] = []
    for _ in range(3):  # imports; measures the time; shows whether two runs of the same work agree
        work = Path(shutil.copytree(original, original.with_name("work")))
        ended = run_process(command.arguments, work, inputs=command.inputs, notes=True)
        assert ended.code == 0, ended.printed
        if not made:
            import_modules(ended.modules, own=True)
        made.append(_results(work, command))
        files = _files(work)
        shutil.rmtree(work)
    assert made[1] == made[2], _difference(made[1], made[2])
    assert made[2]
    assert made[2] != before
    return Reference(before, made[2], files, ended.seconds, ended.events)


def _killed(original: Path, command: Command, reference: Reference, kill: Kill) -> Case:
    work = Path(shutil.copytree(original, original.with_name("work")))
    try:
        outcome, detail = _outcome(work, original, command, reference, kill)
    finally:
        shutil.rmtree(work)
    return Case(command.name, f"killed {kill}", outcome, detail)


def _outcome(work: Path, original: Path, command: Command, reference: Reference, kill: Kill) -> tuple[KillOutcome, str]:
    first = run_process(command.arguments, work, kill, inputs=command.inputs)
    if _inputs(work, command) != _inputs(original, command):
        return KillOutcome.SOURCE_CHANGED, first.printed
    left = _results(work, command)
    if left not in (reference.whole, reference.before):
        return KillOutcome.HALF_WRITTEN, _difference(left, reference.whole)
    again = run_process(command.arguments, work, inputs=command.inputs)
    refused = left == reference.whole and _is_refusal(again)
    found = _results(work, command)
    if found != reference.whole or (again.code != 0 and not refused):
        return KillOutcome.WRONG, f"{again.code} {again.printed} {_difference(found, reference.whole)}"
    if _inputs(work, command) != _inputs(original, command):
        return KillOutcome.SOURCE_CHANGED, again.printed
    left_over = sorted(_files(work) - reference.files)
    if left_over and not refused:  # a command that is refused cleans nothing
        return KillOutcome.WRONG, f"left {left_over}"
    return (KillOutcome.WHOLE if left == reference.whole else KillOutcome.NOTHING), ""


def _is_refusal(ended: Ended) -> bool:
    """Whether a command was refused with one line."""
    return ended.code == 2 and ended.printed.startswith("gqa-convert: ") and ended.printed.count("\n") == 1


def _files(work: Path) -> frozenset[str]:
    return frozenset(path.relative_to(work).as_posix() for path in work.rglob("*"))


def _difference(found: Results, whole: Results) -> str:
    return f"differ: {sorted(name for name in found.keys() | whole.keys() if found.get(name) != whole.get(name))}"


def _inputs(work: Path, command: Command) -> Results:
    return {name: digest for name, digest in digests(work).items() if name.split("/")[0] in command.inputs}


_MOMENTS = re.compile(r'\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?(\.\d+)?Z?|"\w*(seconds|second|memory_bytes)": [\d.]+')
"""What differs between two runs of the same work."""
_END_OF_PNG = b"IEND\xaeB`\x82"


def _results(work: Path, command: Command) -> Results:
    """The result's files, without the times in records."""
    found = {}
    for path in sorted(work.glob(command.results)):
        if path.is_file() and not path.name.startswith("."):
            name = path.relative_to(work).as_posix()
            if path.suffix in (".json", ".html", ".md", ".svg"):
                found[name] = _MOMENTS.sub("", path.read_text(encoding="utf-8"))
            elif command.timed:
                assert path.suffix == ".png"
                found[name] = "a whole picture" if path.read_bytes().endswith(_END_OF_PNG) else "a part of a picture"
            else:
                found[name] = digests(path.parent)[path.name]
    return found
