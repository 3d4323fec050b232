"""The structure of the test tree."""

import ast
from pathlib import Path

import gqa_convert

TESTS = Path(__file__).parents[1]
SHARED = {"helpers", "project"}


def imported_modules(path: Path) -> set[str]:
    """The modules that a file imports, and the dotted names of what it imports from them."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path.relative_to(TESTS)}: write `from tests...`, not a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
    return found


def test_folders_mirror_the_rooms() -> None:
    rooms = {path.parent.name for path in Path(gqa_convert.__file__).parent.glob("*/__init__.py")}
    folders = {path.parent.name for path in TESTS.glob("*/__init__.py")}
    assert folders - SHARED == rooms
    assert not list(TESTS.glob("test_*.py"))


def test_test_modules_share_through_helpers_and_fixtures_only() -> None:
    for path in sorted(TESTS.rglob("*.py")):
        shared = {
            module
            for module in imported_modules(path)
            if module.startswith("tests.") and not module.startswith(("tests.helpers", "tests.verify"))
        }
        assert not shared, f"{path.relative_to(TESTS)}: move what it takes from {', '.join(shared)} into tests/helpers/"
