"""Does the suite notice? Changes the package in one place after another, and counts the changes
that a test catches.

    pip install coverage
    python -m benchmarks.mutations touch --folder FOLDER
    python -m benchmarks.mutations run --folder FOLDER

`touch` copies the checkout into FOLDER and runs the tests there once, noting the lines that each
test executes. `run` draws places from the copy's merging, conversion, verify, training, data and
losses, equally many from each, and runs for each of them the tests that execute its line, the
fastest first, until one fails. A line that no test executes in its own process has the tests of its
package's folder. Tests that failed in `touch` are left out.
"""

import argparse
import ast
import contextlib
import importlib
import itertools
import json
import os
import random
import resource
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coverage
import pytest

PACKAGES = ("merging", "conversion", "verify", "training", "data", "losses")
COUNT = 20
"""Places of each package."""
LIMIT = 60
"""Seconds of tests for each place."""
PYTEST = ["-q", "-m", "slow or not slow", "-p", "no:cacheprovider"]
PAIRS = (
    "Lt LtE, Gt GtE, Eq NotEq, In NotIn, Is IsNot, Add Sub, Mult Add, FloorDiv Mult, Div Mult, "
    "And Or"
)
"""Operators, by the names of `ast`, of which one takes the place of the other."""
SWAPS: dict[type, Any] = {}
for pair in PAIRS.split(", "):
    one, other = (getattr(ast, name) for name in pair.split())
    SWAPS = {other: one, one: other} | SWAPS
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


def mutate(node: Any) -> str | None:
    """Change a node in place, and say how; None if there is nothing to change in it."""
    operators = node.ops if isinstance(node, ast.Compare) else [getattr(node, "op", None)]
    if type(operators[0]) in SWAPS:
        before, operators[0] = type(operators[0]), SWAPS[type(operators[0])]()
        if not isinstance(node, ast.Compare):
            node.op = operators[0]
        return f"{before.__name__} -> {type(operators[0]).__name__}"
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int):
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1
        return f"-> {node.value}"
    if isinstance(node, ast.Name) and node.id in NAMES:
        node.id = NAMES[node.id]
        return f"-> {node.id}"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        node.operand = ast.UnaryOp(ast.Not(), node.operand)
        return "not dropped"
    if isinstance(node, ast.If) and isinstance(
        node.body[-1], ast.Return | ast.Raise | ast.Continue
    ):
        last, node.body[-1] = node.body[-1], ast.copy_location(ast.Pass(), node.body[-1])
        return f"{type(last).__name__} removed"
    return None


def candidates(folder: Path, package: str) -> Iterator[dict[str, Any]]:
    """Every place that can be changed: its file, the number of its node, its line and the line's
    text.
    """
    for path in sorted((folder / "gqa_convert" / package).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        nodes: list[Any] = list(ast.walk(ast.parse(text)))
        for number, node in enumerate(nodes):
            if change := mutate(node):
                line = node.body[-1].lineno if change.endswith("removed") else node.lineno
                place = {
                    "package": package,
                    "file": str(path.relative_to(folder)),
                    "node": number,
                    "line": line,
                }
                yield place | {"text": text.splitlines()[line - 1].strip(), "change": change}


class Recorder:
    """A plugin of pytest: tells coverage which test runs, and writes down how long it took and
    whether it passed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if (current := coverage.Coverage.current()) is not None:
            current.switch_context(nodeid)
        self.test = {"name": nodeid, "seconds": 0.0, "passed": True}

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.test["seconds"] += report.duration
        self.test["passed"] &= report.passed

    def pytest_runtest_logfinish(self) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(self.test) + "\n")


def enter(copy: Path) -> None:
    """Let this process and those that it starts import the package from the copy."""
    os.chdir(copy)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(copy), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    sys.path.insert(0, str(copy))


def touch(folder: Path) -> None:
    """Copy the checkout, and run its tests under coverage."""
    copy = folder / "checkout"
    shutil.copytree(
        Path(__file__).parents[1], copy, ignore=shutil.ignore_patterns(".*", "__pycache__")
    )
    enter(copy)
    recorded = coverage.Coverage(
        data_file=str(folder / "coverage"), include=[str(copy / "gqa_convert" / "*")]
    )
    with recorded.collect():
        pytest.main([*PYTEST, "tests"], plugins=[Recorder(folder / "tests.jsonl")])
    recorded.save()


def read(path: Path) -> list[dict[str, Any]]:
    """What a `Recorder` wrote."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def tests_of(
    place: dict[str, Any], touching: dict[int, list[str]], tests: dict[str, Any]
) -> list[str]:
    """The tests that execute a line, the fastest first, of `LIMIT` seconds together."""
    lines = range(
        place["line"], max(place["line"] - 10, 0), -1
    )  # a call over many lines may count as its first
    nearest: list[str] = next((touching[line] for line in lines if line in touching), [])
    own = [name for name in tests if name.startswith(f"tests/{place['package']}/")]
    found = [name for name in nearest if name in tests and tests[name]["passed"]] or own
    ordered = sorted(found, key=lambda name: float(tests[name]["seconds"]))
    ends = itertools.accumulate(tests[name]["seconds"] for name in ordered)
    return [name for name, end in zip(ordered, ends, strict=True) if end < LIMIT] or ordered[:1]


def noticed_by(copy: Path, tests: list[str]) -> str | None:
    """Run tests in a fork, which has the large libraries: the test that fails, "time" or
    "collection"; None if all pass.
    """
    chosen, results = copy / "chosen.txt", copy / "results.jsonl"
    chosen.write_text("\n".join(tests))
    results.write_text("")
    child = os.fork()
    if not child:
        os.setsid()
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        enter(copy)
        resource.setrlimit(
            resource.RLIMIT_CPU, (3 * LIMIT, 3 * LIMIT)
        )  # however busy the machine is
        signal.alarm(60 * LIMIT)
        os._exit(pytest.main([*PYTEST, "-x", f"@{chosen}"], plugins=[Recorder(results)]))
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        with contextlib.suppress(ProcessLookupError):  # what the tests started
            os.killpg(child, signal.SIGKILL)
        return "time"
    failed = [test["name"] for test in read(results) if not test["passed"]]
    return (failed or ["collection"])[0] if status else None


def identity(place: dict[str, Any]) -> tuple[str, ...]:
    """What stays the same of a place where other lines change."""
    return place["file"], place["text"], place["change"]


def draw(copy: Path, given: Path | None) -> list[dict[str, Any]]:
    """Places, equally many of each package in turn; or those of an earlier result that the copy
    still has.
    """
    every = {package: list(candidates(copy, package)) for package in PACKAGES}
    if given is None:
        samples = [random.Random(name).sample(share, COUNT) for name, share in every.items()]
        return [place for each in zip(*samples, strict=True) for place in each]
    wanted = [identity(place) for place in json.loads(given.read_text())["places"]]
    known = {identity(place): place for share in every.values() for place in share}
    return [known[place] for place in wanted if place in known]


def run(folder: Path, places: list[dict[str, Any]]) -> None:
    """Try each place, and write FOLDER/mutations.json after each."""
    importlib.import_module(
        "transformers.models.llama.modeling_llama"
    )  # with torch, so that forks need not import it
    data = coverage.CoverageData(str(folder / "coverage"))
    data.read()
    copy, tests = folder / "checkout", {test["name"]: test for test in read(folder / "tests.jsonl")}
    for number, place in enumerate(places, 1):
        path = copy / place["file"]
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        mutate(list(ast.walk(tree))[place["node"]])
        measured = next(
            (file for file in data.measured_files() if file.endswith(place["file"])), ""
        )
        chosen = tests_of(place, data.contexts_by_lineno(measured), tests)
        path.write_text(ast.unparse(tree), encoding="utf-8")
        place["noticed_by"] = noticed_by(copy, chosen)
        path.write_text(text, encoding="utf-8")
        caught = sum(each["noticed_by"] is not None for each in places[:number])
        print(
            f"{caught} of {number}:",
            *(place[key] for key in ("file", "line", "change", "noticed_by")),
            flush=True,
        )
        found = {"caught": caught, "tried": number, "places": places[:number]}
        (folder / "mutations.json").write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=["touch", "run"])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument(
        "--places", type=Path, help="an earlier result, whose places are tried again"
    )
    given = parser.parse_args()
    folder = given.folder.resolve()
    touch(folder) if given.step == "touch" else run(folder, draw(folder / "checkout", given.places))


if __name__ == "__main__":
    main()
