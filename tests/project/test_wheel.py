"""The wheel carries what the package needs and nothing else, imports what pyproject.toml declares,
and works where the repository is not, with its core dependencies alone.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from importlib.metadata import distribution, packages_distributions
from pathlib import Path, PurePosixPath

import pytest
from packaging.requirements import Requirement

from gqa_convert import __version__
from gqa_convert.families.table import FAMILIES

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CORE = PROJECT["dependencies"]
EXTRAS = PROJECT["optional-dependencies"]
ENGINES = {"ctranslate2", "llama_cpp", "vllm"}
"""Imported by a worker that runs in another environment."""
NOT_IMPORTED = {"bitsandbytes", "protobuf", "sentencepiece"}
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
    optional = names(EXTRAS["lora"] + EXTRAS["audio"] + EXTRAS["qlora"]) - {"gqa-convert"}
    assert imported() == (names(CORE) | optional) - NOT_IMPORTED


def pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", *arguments, "--no-deps", "--no-index", "--quiet"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the repository, tests and all, so that nothing is left behind in it."""
    folder = tmp_path_factory.mktemp("wheel")
    left_out = shutil.ignore_patterns(
        ".*", "__pycache__", "build", "dist", "runs", "demo-*", "gqa-demo", "*.egg-info"
    )
    shutil.copytree(ROOT, folder / "tree", ignore=left_out)
    pip("wheel", "--no-build-isolation", "--wheel-dir", folder, folder / "tree")
    (built,) = folder.glob("*.whl")
    return built


def test_what_is_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        metadata = archive.read(f"gqa_convert-{__version__}.dist-info/METADATA").decode()
        entry_points = archive.read(
            f"gqa_convert-{__version__}.dist-info/entry_points.txt"
        ).decode()
    assert wheel.name == f"gqa_convert-{__version__}-py3-none-any.whl"
    assert {PurePosixPath(name).parts[0] for name in names} == {
        "gqa_convert",
        f"gqa_convert-{__version__}.dist-info",
    }
    tree = wheel.parent / "tree"
    assert (tree / "tests").is_dir()
    wanted = {
        path.relative_to(tree).as_posix()
        for path in (tree / "gqa_convert").rglob("*")
        if path.is_file()
    }
    assert {name for name in names if name.startswith("gqa_convert/")} == wanted
    files = {family.modeling.file for family in FAMILIES.values() if family.modeling}
    demo = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    assert {f"gqa_convert/families/modeling/{file}.py" for file in files} <= wanted
    assert {f"gqa_convert/demo_checkpoint/{name}" for name in demo} | {
        "gqa_convert/py.typed"
    } <= wanted
    assert f"gqa_convert-{__version__}.dist-info/licenses/LICENSE" in names
    assert f"Version: {__version__}\n" in metadata
    assert "License-Expression: Apache-2.0\n" in metadata
    assert "gqa-convert = gqa_convert.cli:main" in entry_points


@pytest.fixture(scope="module")
def core_alone(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment variables under which Python, without its own site-packages, finds a wheel's
    core dependencies and the package, and nothing else.
    """
    folder = tmp_path_factory.mktemp("core")
    site = folder / "site"
    site.mkdir()
    for name in closure(CORE):
        found = distribution(name)
        for top in {
            file.parts[0]
            for file in found.files or []
            if file.parts[0] not in ("..", "__pycache__")
        }:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(found.locate_file(top))))
    pip("install", "--target", site, wheel)
    (folder / "elsewhere").mkdir()
    own = {"PYTHONPATH": site, "PWD": folder / "elsewhere", "XDG_CACHE_HOME": folder / "cache"}
    return os.environ | {name: str(path) for name, path in own.items()}


def run(environment: dict[str, str], *arguments: str) -> str:
    command = [sys.executable, "-S", "-P", *arguments]
    done = subprocess.run(
        command,
        cwd=environment["PWD"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_optional_package_is_there(core_alone: dict[str, str]) -> None:
    code = (
        "import importlib.util as u; names = ('pytest', 'peft', 'matplotlib', 'rapidfuzz'); "
        "print([name for name in names if u.find_spec(name)])"
    )
    assert run(core_alone, "-c", code) == "[]\n"
    where = run(core_alone, "-c", "import gqa_convert; print(gqa_convert.__file__)")
    assert where.strip() == f"{core_alone['PYTHONPATH']}/gqa_convert/__init__.py"
    assert "convert" in run(core_alone, "-m", "gqa_convert", "--help")


EVERY_MODULE = """
import importlib, pkgutil, gqa_convert
for module in pkgutil.walk_packages(gqa_convert.__path__, "gqa_convert."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""


@pytest.mark.slow
def test_what_an_extra_brings_is_imported_only_where_it_is_used(core_alone: dict[str, str]) -> None:
    run(core_alone, "-c", EVERY_MODULE)


def test_it_converts_the_model_that_it_carries(core_alone: dict[str, str]) -> None:
    source = f"{core_alone['PYTHONPATH']}/gqa_convert/demo_checkpoint"
    command = [
        "-m",
        "gqa_convert",
        "convert",
        source,
        "out",
        "--kv-heads",
        "3",
        "--method",
        "mean",
        "--json",
    ]
    converted = json.loads(run(core_alone, *command))
    out = Path(core_alone["PWD"]) / "out"
    assert json.loads((out / "config.json").read_text(encoding="utf-8"))["num_key_value_heads"] == 3
    assert converted["out_bytes"] == sum(path.stat().st_size for path in out.iterdir())


@pytest.mark.slow
def test_the_demo_runs_on_the_core_dependencies_outside_the_repository(
    core_alone: dict[str, str],
) -> None:
    settings = "calibration_tokens=2048, held_out_tokens=4096, uptraining_tokens=12288"
    code = f"from gqa_convert.demo import run_demo; print(run_demo('demo', {settings})['passed'])"
    assert run(core_alone, "-c", code).splitlines()[-1] == "True"
    assert (Path(core_alone["PWD"]) / "demo" / "uptraining" / "model" / "config.json").is_file()
