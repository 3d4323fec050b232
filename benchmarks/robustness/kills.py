"""Writing commands that are killed at random moments, and then run again."""

import json
import os
import random
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.robustness.outcomes import Case, KillOutcome
from benchmarks.robustness.processes import import_modules_of, run_process
from benchmarks.robustness.sources import CONFIG, digests, write_checkpoint

TEXT = "".join(
    f"Line {number} of the text, about {number * 7 % 13} things and {number % 5} more.\n" for number in range(200)
)


@dataclass(frozen=True, slots=True)
class Command:
    """A command that writes.

    Attributes:
        name: its row of the table.
        arguments: of the command line, which runs in the working folder.
        results: patterns of the files that appear whole or not at all, relative to the working folder.
        inputs: folders and files that no run may change.
        together: whether the results appear in one step; otherwise each file does.
        prepared_by: a command that makes what this one needs.
    """

    name: str
    arguments: tuple[str, ...]
    results: str
    inputs: tuple[str, ...] = ("model", "text.txt")
    together: bool = True
    prepared_by: tuple[str, ...] = ()


_RECIPE = (
    "model=pooled",
    "teacher=model",
    "data=text.txt",
    "output=run",
    "tokens=384",
    "tokens_per_step=64",
    "sequence_length=32",
    "micro_batch_size=2",
    "precision=no",
    "save_every=2",
    "log_every=2",
    "learning_rate=1e-3",
)
_POOL = ("convert", "model", "pooled", "-n", "2", "-m", "mean", "-q")
_FIT = ("--calibration", "text.txt", "--calibration-tokens", "256", "--calibration-length", "32", "--fit-steps", "4")

COMMANDS = (
    Command("convert, mean", ("convert", "model", "out", "-n", "2", "-m", "mean"), "out/**/*"),
    Command("convert, factor", ("convert", "model", "out", "-n", "2", *_FIT[:6], "-m", "factor"), "out/**/*"),
    Command("convert, fit", ("convert", "model", "out", "-n", "2", *_FIT, "--kl-steps", "0"), "out/**/*"),
    Command("restate", ("restate", "yi", "out"), "out/**/*", inputs=("yi",)),
    Command("tokenize", ("tokenize", "recipe.yaml", "--processes", "1"), "cache/**/*.tokens", prepared_by=_POOL),
    Command("uptrain", ("uptrain", "recipe.yaml"), "run/model/*", ("model", "text.txt", "pooled"), prepared_by=_POOL),
    Command(
        "publish --dry-run",
        ("publish", "pooled", "--repo-id", "me/pooled", "--base-model", "org/model", "--license", "mit", "--dry-run"),
        "pooled/README.md",
        prepared_by=_POOL,
    ),
    Command("report", ("report", "pooled", "--out", "page"), "page/*", together=False, prepared_by=_POOL),
)


def run_kills(number: int, seed: int, folder: Path, only: str | None = None) -> Iterator[Case]:
    """Yield `number` cases of each command, whose files lie in `folder` meanwhile."""
    os.environ["XDG_CACHE_HOME"] = "cache"  # relative to each working folder
    for command in COMMANDS:
        if only in (None, command.name):
            original = template(folder / "template", command.prepared_by)
            whole, hidden, seconds = _reference(original, command)
            dice = random.Random(f"{seed} {command.name}")
            print(f"{command.name}: {seconds:.1f} s undisturbed", file=sys.stderr, flush=True)
            for _ in range(number):
                yield _killed(original, command, whole, hidden, dice.uniform(0, 1.1 * seconds))
            shutil.rmtree(original)


def template(folder: Path, prepared_by: tuple[str, ...]) -> Path:
    """A folder with all that commands read, and what another command prepares."""
    write_checkpoint(folder / "model", layers=2)
    shutil.copytree(folder / "model", folder / "yi")
    yi = CONFIG | {"model_type": "Yi", "architectures": ["YiForCausalLM"], "num_hidden_layers": 2}
    (folder / "yi" / "config.json").write_text(json.dumps(yi), encoding="utf-8")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    lines = [each.replace("=", ": ", 1) for each in _RECIPE]
    (folder / "recipe.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if prepared_by:
        ended = run_process(prepared_by, folder)
        assert ended.code == 0, ended.printed
    return folder


def _reference(original: Path, command: Command) -> tuple[dict[str, str], set[str], float]:
    """The results of a run that nothing disturbs, the hidden files that it leaves, and how long it takes once all modules are imported."""
    for first in (True, False):
        work = Path(shutil.copytree(original, original.with_name("work")))
        ended = run_process(command.arguments, work, list_modules=first)
        assert ended.code == 0, ended.printed
        if first:
            import_modules_of(work)
        found = _results(work, command)
        assert found
        hidden = _hidden(work)
        shutil.rmtree(work)
    return found, hidden, ended.seconds


def _killed(original: Path, command: Command, whole: dict[str, str], hidden: set[str], moment: float) -> Case:
    work = Path(shutil.copytree(original, original.with_name("work")))
    try:
        outcome, detail = _outcome(work, original, command, whole, hidden, moment)
    finally:
        shutil.rmtree(work)
    return Case(command.name, f"killed after {moment:.3f} s", outcome, detail)


def _outcome(
    work: Path, original: Path, command: Command, whole: dict[str, str], hidden: set[str], moment: float
) -> tuple[KillOutcome, str]:
    first = run_process(command.arguments, work, kill_after=moment)
    if _inputs(work, command) != _inputs(original, command):
        return KillOutcome.SOURCE_CHANGED, first.printed
    left = _results(work, command)
    if left and (left != whole if command.together else not left.items() <= whole.items()):
        return KillOutcome.HALF_WRITTEN, _difference(left, whole)
    if left == whole:
        return KillOutcome.WHOLE, ""
    again = run_process(command.arguments, work)
    found = _results(work, command)
    if again.code != 0 or found != whole:
        return KillOutcome.WRONG, f"{again.code} {again.printed} {_difference(found, whole)}"
    if _inputs(work, command) != _inputs(original, command):
        return KillOutcome.SOURCE_CHANGED, again.printed
    left_over = sorted(_hidden(work) - hidden)
    return (KillOutcome.WRONG, f"left {left_over}") if left_over else (KillOutcome.NOTHING, "")


def _hidden(work: Path) -> set[str]:
    """The hidden files and folders, which hold unfinished work; `uptrain` keeps some of its own."""
    return {path.relative_to(work).as_posix() for path in work.rglob(".*")}


def _difference(found: dict[str, str], whole: dict[str, str]) -> str:
    return f"differ: {sorted(name for name in found.keys() | whole.keys() if found.get(name) != whole.get(name))}"


def _inputs(work: Path, command: Command) -> dict[str, str]:
    return {name: digest for name, digest in digests(work).items() if name.split("/")[0] in command.inputs}


_MOMENTS = re.compile(r'\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?(\.\d+)?Z?|"\w*(seconds|second|memory_bytes)": [\d.]+')
"""What differs between two runs of the same work."""


def _results(work: Path, command: Command) -> dict[str, str]:
    """The content or the digest of each of the result's files, without the times in records."""
    found = {}
    for path in sorted(work.glob(command.results)):
        if path.is_file():
            name = path.relative_to(work).as_posix()
            if path.suffix in (".json", ".html", ".md", ".svg"):
                found[name] = _MOMENTS.sub("", path.read_text(encoding="utf-8"))
            else:
                found[name] = digests(path.parent)[path.name]
    return found
