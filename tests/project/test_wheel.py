"""The wheel carries what the package needs and nothing else, and works where the repository is not."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath

import pytest

from gqa_convert import __version__
from gqa_convert.families.table import FAMILIES

ROOT = Path(__file__).parents[2]
_LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "runs", "demo-*", "gqa-demo", "*.egg-info")


def _pip(*arguments: str | Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        *map(str, arguments),
        "--no-deps",
        "--no-index",
        "--quiet",
        "--disable-pip-version-check",
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the repository, tests and all, so that nothing is left behind in it."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, folder / "tree", ignore=_LEFT_OUT)
    assert (folder / "tree" / "tests").is_dir()
    _pip("wheel", "--no-build-isolation", "--wheel-dir", folder, folder / "tree")
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed") / "site"
    _pip("install", "--target", folder, wheel)
    return folder


def _python(installed: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Python in an empty folder, where the installed package comes before any other of its name."""
    empty = installed.parent / "elsewhere"
    empty.mkdir(exist_ok=True)
    command = [sys.executable, "-P", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(installed)}
    return subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, check=False)


def test_what_is_in_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        metadata = archive.read(f"gqa_convert-{__version__}.dist-info/METADATA").decode()
        entry_points = archive.read(f"gqa_convert-{__version__}.dist-info/entry_points.txt").decode()
    assert wheel.name == f"gqa_convert-{__version__}-py3-none-any.whl"
    assert {PurePosixPath(name).parts[0] for name in names} == {"gqa_convert", f"gqa_convert-{__version__}.dist-info"}
    tree = wheel.parent / "tree"
    wanted = {path.relative_to(tree).as_posix() for path in (tree / "gqa_convert").rglob("*") if path.is_file()}
    assert {name for name in names if name.startswith("gqa_convert/")} == wanted
    own = {
        f"gqa_convert/families/modeling/{family.modeling.file}.py" for family in FAMILIES.values() if family.modeling
    }
    demo = {
        f"gqa_convert/demo_checkpoint/{name}"
        for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    }
    assert own
    assert own | demo | {"gqa_convert/py.typed", f"gqa_convert-{__version__}.dist-info/licenses/LICENSE"} <= set(names)
    assert f"Version: {__version__}\n" in metadata
    assert "License-Expression: Apache-2.0\n" in metadata
    assert "gqa-convert = gqa_convert.cli:main" in entry_points


def test_it_converts_the_model_that_it_carries(installed: Path) -> None:
    source = installed / "gqa_convert" / "demo_checkpoint"
    planned = _python(
        installed, "-m", "gqa_convert", "convert", source, "--groups", "3", "--method", "mean", "--dry-run", "--json"
    )
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["kv_bytes_per_token"] == {"before": 7680, "after": 1920}
    converted = _python(
        installed, "-m", "gqa_convert", "convert", source, "out", "--groups", "3", "--method", "mean", "--json"
    )
    assert converted.returncode == 0, converted.stderr
    out = installed.parent / "elsewhere" / "out"
    assert json.loads((out / "config.json").read_text(encoding="utf-8"))["num_key_value_heads"] == 3
    assert json.loads(converted.stdout)["out_bytes"] == sum(path.stat().st_size for path in out.iterdir())
