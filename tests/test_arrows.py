"""Imports point one way, and torch is never imported before it is needed."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import gqa_convert

PACKAGE = Path(gqa_convert.__file__).parent

# Each room and the rooms it may import; a room is a file or a folder of the package.
ALLOWED = {
    "errors": set(),
    "engines": set(),
    "paths": set(),
    "families": {"engines", "errors", "layouts"},
    "layouts": set(),
    "modeling": {"families"},
    "translation": {"engines", "errors", "layouts", "merging"},
    "stdlib_text": set(),
    "machine": {""},
    "lengths": set(),
    "merging": {"errors"},
    "checkpoint": {"errors", "paths"},
    "geometry": {"checkpoint", "errors", "families", "layouts", "merging"},
    "absorbing": {"errors", "families", "geometry", "layouts", "merging"},
    "fitting": {"", "absorbing", "calibration", "checkpoint", "errors", "geometry", "loading", "merging", "plan", "training"},
    "plan": {"absorbing", "checkpoint", "engines", "errors", "families", "geometry", "layouts", "merging", "translation"},
    "writing": {"checkpoint", "errors", "merging", "plan", "translation"},
    "provenance": {"checkpoint", "machine", "plan"},
    "companions": {"checkpoint", "families", "plan", "provenance", "translation"},
    "convert": {"checkpoint", "companions", "errors", "fitting", "paths", "plan", "provenance", "writing"},
    "restating": {"checkpoint", "companions", "errors", "families", "layouts", "merging", "paths", "plan", "writing"},
    "inspecting": {"absorbing", "calibration", "checkpoint", "errors", "fitting", "geometry", "paths", "plan"},
    "data": {"errors", "families", "paths", "stdlib_text"},
    "recipe": {"errors", "paths"},
    "training": {
        "",
        "attention",
        "checkpoint",
        "data",
        "errors",
        "families",
        "geometry",
        "lengths",
        "loading",
        "machine",
        "provenance",
        "recipe",
    },
    "uptrain": {"errors", "loading", "recipe", "training"},
    "calibration": {"checkpoint", "data", "errors", "lengths", "loading"},
    "evaluating": {"calibration", "checkpoint", "data", "errors", "lengths", "loading", "machine", "paths", "training"},
    "loading": {"errors", "families", "modeling"},
    "verify": {"checkpoint", "errors", "evaluating", "families", "loading", "paths"},
    "demo": {
        "checkpoint",
        "convert",
        "errors",
        "evaluating",
        "inspecting",
        "loading",
        "paths",
        "plan",
        "stdlib_text",
        "training",
        "uptrain",
        "verify",
    },
    "attention": {"errors"},
    "benchmarking": {
        "attention",
        "checkpoint",
        "errors",
        "families",
        "inspecting",
        "lengths",
        "loading",
        "machine",
        "modeling",
        "paths",
        "plan",
    },
    "reporting": {"checkpoint", "errors", "paths", "provenance", "training"},
    "recommending": {"benchmarking", "checkpoint", "errors", "inspecting", "lengths", "machine", "paths", "plan", "reporting"},
    "publishing": {"checkpoint", "errors", "paths", "plan", "provenance", "reporting"},
    "serving": {"errors", "lengths", "loading", "paths", "stdlib_text"},
    "console": {"engines", "plan"},
    "cli": {
        "",
        "benchmarking",
        "checkpoint",
        "console",
        "convert",
        "data",
        "demo",
        "errors",
        "evaluating",
        "inspecting",
        "plan",
        "publishing",
        "recommending",
        "reporting",
        "restating",
        "serving",
        "uptrain",
        "verify",
    },
    "__main__": {"cli"},
    "__init__": {"attention", "checkpoint", "convert", "errors", "inspecting", "plan", "verify"},
}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "gqa_convert":
            parts = (node.module or "").split(".")[1:]
            names = [parts[0]] if parts else [alias.name for alias in node.names]
            rooms |= {name if (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file() else "" for name in names}
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("gqa_convert") for alias in node.names), f"{path}: write `from gqa_convert... import`"
    return rooms


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    room = room_of(path)
    assert room in ALLOWED, f"say in this test what the new room {room} may import"
    assert imported_rooms(path) <= ALLOWED[room] | {room}


def test_merging_knows_numpy_only() -> None:
    for path in (PACKAGE / "merging").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for module in modules:
                assert module.split(".")[0] in {*sys.stdlib_module_names, "numpy", "ml_dtypes", "gqa_convert"}


def loaded_after(code: str, *arguments: str) -> set[str]:
    """Names of the modules that a fresh interpreter has loaded after `code`."""
    script = f"import sys\n{code}\nprint('|'.join(sys.modules))"
    result = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True)
    return set(result.stdout.strip().splitlines()[-1].split("|"))


def test_the_package_imports_neither_torch_nor_numpy() -> None:
    loaded = loaded_after("import gqa_convert, gqa_convert.cli")
    assert not loaded & {"torch", "transformers", "numpy", "huggingface_hub", "datasets", "accelerate", "rich.progress"}


def test_converting_imports_no_torch(tmp_path: Path) -> None:
    from tests.checkpoints import write_llama

    source = write_llama(tmp_path / "source")
    code = "from gqa_convert import convert_checkpoint\nconvert_checkpoint(sys.argv[1], sys.argv[2], 3)"
    loaded = loaded_after(code, str(source), str(tmp_path / "out"))
    assert (tmp_path / "out" / "config.json").is_file()
    assert not loaded & {"torch", "transformers", "huggingface_hub"}


def test_the_lazy_names_resolve() -> None:
    for name in gqa_convert.__all__:
        assert getattr(gqa_convert, name) is not None
    with pytest.raises(AttributeError):
        gqa_convert.no_such_name  # noqa: B018
