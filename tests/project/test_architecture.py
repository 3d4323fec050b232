"""Imports point down the list of packages in docs/developing.md only, and torch is never imported
before it is needed.
"""

import ast
import re
import sys
from pathlib import Path

import pytest

import gqa_convert
from tests.helpers.command_line import loaded_after

PACKAGE = Path(gqa_convert.__file__).parent
SHEET = PACKAGE.parent / "docs" / "developing.md"
SHARED = {"errors", "_version"}  # modules that every package may import
DOORS = {"__init__", "__main__"}  # they name what is inside, for those outside


def read_sheet() -> dict[str, set[str]]:
    """Package -> the packages that it uses, from top to bottom, as docs/developing.md has them."""
    rows = re.findall(
        r"^\| `(\w+)` \|[^|]+\|([^|]*)\|$", SHEET.read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    return {package: set(used.replace(",", " ").split()) for package, used in rows}


PACKAGES = read_sheet()


def package_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(path: Path) -> set[tuple[str, str]]:
    """(module below the package, imported name) of every import of the package in a file, but for
    those from its own folder.
    """
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            folder = ".".join(("gqa_convert", *path.relative_to(PACKAGE).parent.parts))
            assert node.level < 2, f"{path}: write `from gqa_convert... import`"
            is_whole = "modeling" not in path.parts and path.parent != PACKAGE
            assert not (is_whole and f"{node.module}.".startswith(f"{folder}.")), (
                f"{path}: write `from .{(node.module or '').removeprefix(folder).lstrip('.')} "
                "import`"
            )
        if (
            isinstance(node, ast.ImportFrom)
            and not node.level
            and (node.module or "").split(".")[0] == "gqa_convert"
        ):
            below = (node.module or "").removeprefix("gqa_convert").lstrip(".")
            found |= {(below or alias.name, alias.name) for alias in node.names}
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("gqa_convert") for alias in node.names), (
                f"{path}: write `from gqa_convert... import`"
            )
    return found


def test_the_sheet_lists_the_packages() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    modules = {path.stem for path in PACKAGE.glob("*.py")}
    assert folders | (modules - SHARED - DOORS) == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_down_the_sheet(package: str) -> None:
    order = list(PACKAGES)
    below = set(order[order.index(package) + 1 :])
    assert PACKAGES[package] <= below, f"docs/developing.md gives {package} an arrow that points up"
    used = set()
    for path in sorted((PACKAGE / package).rglob("*.py")) or [PACKAGE / f"{package}.py"]:
        for module, _ in imported(path):
            target = module.split(".")[0]
            if target in SHARED | {package}:
                continue
            assert target in below, (
                f"{path.relative_to(PACKAGE)} imports {module}, which is not below {package}"
            )
            used.add(target)
    assert used == PACKAGES[package], (
        f"docs/developing.md: the row of {package} must name {', '.join(sorted(used))}"
    )


def test_private_names_stay_in_their_package() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        for module, name in imported(path):
            private = name.startswith("_") and name != "__version__"
            private |= (
                any(part.startswith("_") for part in module.split(".")) and module != "_version"
            )
            assert not private or module.split(".")[0] == package_of(path), (
                f"{path.relative_to(PACKAGE)}: {module}.{name}"
            )


def test_merging_knows_arrays_only() -> None:
    for path in (PACKAGE / "merging").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = []
            if isinstance(node, ast.ImportFrom) and not node.level:
                modules = [node.module or ""]
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for module in modules:
                assert module.split(".")[0] in {
                    *sys.stdlib_module_names,
                    "array_api_compat",
                    "numpy",
                    "ml_dtypes",
                    "gqa_convert",
                }


def test_the_package_imports_neither_torch_nor_numpy() -> None:
    loaded = loaded_after("import gqa_convert, gqa_convert.cli")
    assert not loaded & {
        "torch",
        "transformers",
        "numpy",
        "huggingface_hub",
        "datasets",
        "accelerate",
        "rich.progress",
    }


def test_converting_imports_no_torch(tmp_path: Path) -> None:
    from tests.helpers.checkpoints import write_llama

    source = write_llama(tmp_path / "source")
    code = (
        "from gqa_convert import convert_checkpoint\nconvert_checkpoint(sys.argv[1], sys.argv[2], "
        "3)"
    )
    loaded = loaded_after(code, str(source), str(tmp_path / "out"))
    assert (tmp_path / "out" / "config.json").is_file()
    assert not loaded & {"torch", "transformers", "huggingface_hub"}


def test_the_lazy_names_resolve() -> None:
    for name in gqa_convert.__all__:
        assert getattr(gqa_convert, name) is not None
    with pytest.raises(AttributeError):
        gqa_convert.no_such_name  # noqa: B018
