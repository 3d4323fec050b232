"""Does the suite notice? Changes the package in one place after another, and counts the changes that a test catches.

    pip install coverage
    python -m benchmarks.mutations touch --folder FOLDER
    python -m benchmarks.mutations run --folder FOLDER --count 20 --output mutations.json

`touch` copies the checkout into FOLDER and runs the tests there once, noting the lines that each test executes. `run`
draws places from the copy's merging, conversion, verify, training, data and losses, equally many from each, and runs
for each of them the tests that execute its line, the fastest first, until one fails. A line that no test executes in
its own process has the tests of its package's folder. Tests that failed in `touch` are left out.
"""

import argparse
import ast
import contextlib
import importlib
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

ROOT = Path(__file__).parents[1]
PACKAGES = ("merging", "conversion", "verify", "training", "data", "losses")
COPIED = ("gqa_convert", "tests", "benchmarks", "recipes", "docs", "pyproject.toml", "README.md", "constraints.txt")
LIMIT = 60
"""Seconds of tests for each place."""
PYTEST = ["-q", "-m", "slow or not slow", "-p", "no:cacheprovider"]
PAIRS = "Lt LtE, Gt GtE, Eq NotEq, In NotIn, Is IsNot, Add Sub, Mult Add, FloorDiv Mult, Div Mult, And Or"
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
    if (
        isinstance(node, ast.If | ast.While)
        and isinstance(node.test, ast.UnaryOp)
        and isinstance(node.test.op, ast.Not)
    ):
        node.test = node.test.operand
        return "not dropped"
    if isinstance(node, ast.If) and isinstance(node.body[-1], ast.Return | ast.Raise | ast.Continue):
        last = node.body[-1]
        node.body[-1] = ast.copy_location(ast.Pass(), last)
        return f"{type(last).__name__} removed"
    return None


def candidates(folder: Path, package: str) -> Iterator[dict[str, Any]]:
    """Every place that can be changed: its file, the number of its node, its line and the line's text."""
    for path in sorted((folder / "gqa_convert" / package).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        nodes: list[Any] = list(ast.walk(ast.parse(text)))
        for number, node in enumerate(nodes):
            change = mutate(node)
            if change is not None:
                line = node.body[-1].lineno if change.endswith("removed") else node.lineno
                place = {"package": package, "file": str(path.relative_to(folder)), "node": number, "line": line}
                yield place | {"text": text.splitlines()[line - 1].strip(), "change": change}


class Recorder:
    """A plugin of pytest: tells coverage which test runs, and writes down how long each took and whether it passed."""

    def __init__(self, path: Path) -> None:
        self.path, self.test = path, dict[str, Any]()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        import coverage

        current = coverage.Coverage.current()
        assert current is not None
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
    os.environ["PYTHONPATH"] = os.pathsep.join([str(copy), *filter(None, [os.environ.get("PYTHONPATH")])])
    sys.path.insert(0, str(copy))


def touch(folder: Path) -> None:
    """Copy the checkout, and run its tests under coverage."""
    import coverage
    import pytest

    copy = folder / "checkout"
    for name in COPIED:
        copier: Any = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy.mkdir(parents=True, exist_ok=True)
        copier(ROOT / name, copy / name)
    enter(copy)
    recorded = coverage.Coverage(data_file=str(folder / "coverage"), include=[str(copy / "gqa_convert" / "*")])
    with recorded.collect():
        pytest.main([*PYTEST, "tests"], plugins=[Recorder(folder / "tests.jsonl")])
    recorded.save()


def tests_of(place: dict[str, Any], touching: dict[int, list[str]], tests: dict[str, Any]) -> list[str]:
    """The tests that execute a line, the fastest first, of `LIMIT` seconds together."""
    lines = range(place["line"], max(place["line"] - 10, 0), -1)  # a call over many lines may count as its first
    nearest: list[str] = next((touching[line] for line in lines if line in touching), [])
    own = [name for name in tests if name.startswith(f"tests/{place['package']}/")]
    found = [name for name in nearest if name in tests and tests[name]["passed"]] or own
    total = 0.0
    chosen: list[str] = []
    for name in sorted(found, key=lambda name: float(tests[name]["seconds"])):
        total += tests[name]["seconds"]
        if total < LIMIT or not chosen:
            chosen.append(name)
    return chosen


class FirstFailure:
    """A plugin of pytest: writes down the name of the first test that fails."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.path.write_text(report.nodeid)


def noticed_by(copy: Path, tests: list[str]) -> str | None:
    """Run tests in a fork, which has the large libraries: the test that fails, "time" or "collection"; None if all pass."""
    import pytest

    chosen, failure = copy / "chosen.txt", copy / "failure.txt"
    chosen.write_text("\n".join(tests))
    failure.write_text("collection")
    child = os.fork()
    if not child:
        os.setsid()
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        enter(copy)
        resource.setrlimit(resource.RLIMIT_CPU, (3 * LIMIT, 3 * LIMIT))  # however busy the machine is
        signal.alarm(60 * LIMIT)
        os._exit(pytest.main([*PYTEST, "-x", f"@{chosen}"], plugins=[FirstFailure(failure)]))
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        with contextlib.suppress(ProcessLookupError):  # what the tests started
            os.killpg(child, signal.SIGKILL)
        return "time"
    return failure.read_text() if status else None


def draw(copy: Path, count: int, given: Path | None) -> list[dict[str, Any]]:
    """Places, equally many of each package in turn; or those of an earlier result that the copy still has."""
    every = {package: list(candidates(copy, package)) for package in PACKAGES}
    if given is None:
        samples = [random.Random(name).sample(share, count) for name, share in every.items()]
        return [place for each in zip(*samples, strict=True) for place in each]
    known = {(place["file"], place["text"], place["change"]): place for share in every.values() for place in share}
    wanted = [(place["file"], place["text"], place["change"]) for place in json.loads(given.read_text())["places"]]
    return [known[place] for place in wanted if place in known]


def run(folder: Path, places: list[dict[str, Any]], output: Path) -> None:
    """Try each place, and write the result after each."""
    import coverage

    for library in ("torch", "transformers.models.llama.modeling_llama"):  # so that forks need not import them
        importlib.import_module(library)
    data = coverage.CoverageData(str(folder / "coverage"))
    data.read()
    copy, lines = folder / "checkout", (folder / "tests.jsonl").read_text().splitlines()
    tests = {test["name"]: test for test in map(json.loads, lines)}
    for number, place in enumerate(places, 1):
        path = copy / place["file"]
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        mutate(list(ast.walk(tree))[place["node"]])
        measured = next((file for file in data.measured_files() if file.endswith(place["file"])), "")
        chosen = tests_of(place, data.contexts_by_lineno(measured), tests)
        path.write_text(ast.unparse(tree), encoding="utf-8")
        place["noticed_by"] = noticed_by(copy, chosen)
        path.write_text(text, encoding="utf-8")
        caught = sum(each["noticed_by"] is not None for each in places[:number])
        where = f"{place['file']}:{place['line']} {place['change']}"
        print(f"{caught} of {number}: {where} noticed by {place['noticed_by']}", flush=True)
        output.write_text(json.dumps({"caught": caught, "tried": number, "places": places[:number]}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["touch", "run"])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--count", type=int, default=20, help="places of each package")
    parser.add_argument("--places", type=Path, help="an earlier result, whose places are tried again")
    parser.add_argument("--output", type=Path, default=Path("mutations.json"))
    given = parser.parse_args()
    folder = given.folder.resolve()
    if given.step == "touch":
        touch(folder)
    else:
        run(folder, draw(folder / "checkout", given.count, given.places), given.output.resolve())


if __name__ == "__main__":
    main()
