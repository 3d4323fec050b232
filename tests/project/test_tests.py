"""The structure of the test tree."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gqa_convert
from tests.helpers.command_line import run_python

TESTS = Path(__file__).parents[1]
SHARED = {"helpers", "project", "benchmarks"}


def imported_modules(path: Path) -> set[str]:
    """The modules that a file imports, and the dotted names of what it imports from them."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, (
                f"{path.relative_to(TESTS)}: write `from tests...`, not a relative import"
            )
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
    return found


def test_folders_mirror_the_packages() -> None:
    packages = {
        path.parent.name for path in Path(gqa_convert.__file__).parent.glob("*/__init__.py")
    }
    folders = {path.parent.name for path in TESTS.glob("*/__init__.py")}
    assert folders - SHARED == packages | {"demo"}
    assert not list(TESTS.glob("test_*.py"))


def test_test_modules_share_through_helpers_and_fixtures_only() -> None:
    for path in sorted(TESTS.rglob("*.py")):
        shared = {
            module
            for module in imported_modules(path)
            if module.startswith("tests.") and not module.startswith("tests.helpers")
        }
        assert not shared, (
            f"{path.relative_to(TESTS)}: move what it takes from {', '.join(shared)} into "
            "tests/helpers/"
        )


@pytest.mark.parametrize(
    "code",
    [
        "print('out'); print('err', file=sys.stderr); sys.exit(3)",
        "sys.exit('a message')",
        "print(os.getcwd(), os.environ['COLUMNS'], sys.argv[1:])",
        "os.kill(os.getpid(), 9)",
        "import atexit; atexit.register(print, 'at the end'); print('whole', end='')",
    ],
)
def test_a_fork_is_as_a_new_interpreter(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "77")
    command = ["-c", f"import os, sys\n{code}", "one", "two words"]
    new = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    fork = run_python(*command)
    assert (fork.returncode, fork.stdout, fork.stderr) == (new.returncode, new.stdout, new.stderr)


def test_what_reads_the_environment_is_imported_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("huggingface_hub", "torch")
    code = (
        "import os, sys; print(os.environ.get('HF_HOME'), *(name in sys.modules for name in "
        f"{names}))"
    )
    assert run_python("-c", code).stdout.split()[1:] == ["True", "True"]
    monkeypatch.setenv("HF_HOME", "/elsewhere")
    assert run_python("-c", code).stdout == "/elsewhere False True\n"
    assert (
        run_python("-c", code, environment={**os.environ, "HF_HOME": "/given"}).stdout
        == "/given False True\n"
    )
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    assert run_python("-c", code).stdout == "/elsewhere False False\n"


@pytest.mark.parametrize("value", ["set", "left"])
def test_a_variable_ends_with_its_test(value: str) -> None:
    if value == "set":
        os.environ["HF_OF_ANOTHER_TEST"] = value
    assert os.environ.get("HF_OF_ANOTHER_TEST", "left") == value
