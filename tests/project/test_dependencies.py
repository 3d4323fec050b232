"""The package imports what pyproject.toml declares, and runs with its core dependencies alone."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CORE = PROJECT["dependencies"]
EXTRAS = PROJECT["optional-dependencies"]
ENGINES = {"llama_cpp", "vllm"}
"""Imported by a worker that runs in another environment."""
NOT_IMPORTED = {"bitsandbytes"}
"""transformers and PEFT import it."""


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def names(requirements: Iterable[str]) -> set[str]:
    return {normalised(Requirement(text).name) for text in requirements}


def imported() -> set[str]:
    """The distributions whose modules the package imports, anywhere."""
    modules: set[str] = set()
    for path in (ROOT / "gqa_convert").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules.add(str(node.module).partition(".")[0])
    modules -= {*sys.stdlib_module_names, *ENGINES, "gqa_convert"}
    known = packages_distributions()
    return {normalised(name) for module in modules for name in known[module]}


def closure(requirements: Iterable[str]) -> set[str]:
    """The installed distributions that some requirements need, themselves included."""
    found: set[str] = set()
    waiting = [(text, "") for text in requirements]
    while waiting:
        text, extra = waiting.pop()
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = normalised(requirement.name)
        new = {f"{name}[{each}]" for each in (*requirement.extras, "")} - found
        found |= new
        for each in new:
            own = each.removeprefix(f"{name}[").removesuffix("]")
            waiting += [(needed, own) for needed in distribution(name).requires or []]
    return {name.partition("[")[0] for name in found}


def test_what_is_imported_is_declared_and_what_is_declared_is_imported() -> None:
    optional = names(EXTRAS["lora"] + EXTRAS["plot"] + EXTRAS["audio"] + EXTRAS["qlora"]) - {"gqa-convert"}
    assert imported() == names(CORE) | optional - NOT_IMPORTED


@pytest.fixture(scope="module")
def core_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment variables under which Python, without its own site-packages, finds a wheel's core dependencies and
    the package, and nothing else.
    """
    folder = tmp_path_factory.mktemp("core")
    site = folder / "site"
    site.mkdir()
    for name in closure(CORE):
        found = distribution(name)
        for top in {file.parts[0] for file in found.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(found.locate_file(top))))
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation", "--quiet"]
    subprocess.run([*build, "--wheel-dir", folder, ROOT], check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", "--target", site, wheel]
    subprocess.run(install, check=True, capture_output=True)
    (folder / "elsewhere").mkdir()
    own = {"PYTHONPATH": site, "PWD": folder / "elsewhere", "XDG_CACHE_HOME": folder / "cache"}
    return os.environ | {name: str(path) for name, path in own.items()}


def run(environment: dict[str, str], *arguments: str) -> str:
    command = [sys.executable, "-S", "-P", *arguments]
    done = subprocess.run(command, cwd=environment["PWD"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_optional_package_is_there(core_alone: dict[str, str]) -> None:
    code = "import importlib.util as u; print([n for n in ('pytest', 'peft', 'matplotlib', 'jiwer') if u.find_spec(n)])"
    assert run(core_alone, "-c", code) == "[]\n"
    where = run(core_alone, "-c", "import gqa_convert; print(gqa_convert.__file__)")
    assert where.strip() == f"{core_alone['PYTHONPATH']}/gqa_convert/__init__.py"
    assert "convert" in run(core_alone, "-m", "gqa_convert", "--help")


@pytest.mark.slow
def test_the_demo_runs_on_the_core_dependencies_outside_the_repository(core_alone: dict[str, str]) -> None:
    settings = "calibration_tokens=2048, held_out_tokens=4096, uptraining_tokens=12288"
    code = f"from gqa_convert.demo import run_demo; print(run_demo('demo', {settings})['passed'])"
    assert run(core_alone, "-c", code).splitlines()[-1] == "True"
    assert (Path(core_alone["PWD"]) / "demo" / "uptraining" / "model" / "config.json").is_file()
