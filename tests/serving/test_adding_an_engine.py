"""Every engine has everything that docs/developing.md asks for, and a forgotten step is named."""

import ast
import re
from pathlib import Path

import pytest

from gqa_convert.serving.engines import ENGINES, Engine

ROOT = Path(__file__).resolve().parents[2]
ENTRIES, GUIDE, TYPES = (
    Path("gqa_convert/serving/engines.py"),
    Path("docs/serving-and-publishing.md"),
    Path("pyproject.toml"),
)
HELP = [Path("gqa_convert/cli/check_serving.py"), Path("gqa_convert/cli/benchmark.py")]


def forgotten(name: str, engine: Engine, root: Path) -> list[str]:
    """The steps of docs/developing.md that an engine lacks in a tree of files."""
    module = Path("gqa_convert/serving") / f"{engine.module.rpartition('.')[2]}.py"
    code = (root / module).read_text(encoding="utf-8") if (root / module).is_file() else ""
    classes = {
        node.name: {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
        for node in ast.parse(code).body
        if isinstance(node, ast.ClassDef)
    }
    text = {path: (root / path).read_text(encoding="utf-8") for path in (ENTRIES, GUIDE, TYPES, *HELP)}
    (columns,) = re.findall(r"^\| \| .*llama\.cpp.*$", text[GUIDE], re.MULTILINE)
    (untyped,) = re.findall(r"^module = \[\"accelerate.*$", text[TYPES], re.MULTILINE)
    imported = {found for found in re.findall(r"^ +(?:from|import) (\w+)", code, re.MULTILINE) if found != "numpy"}
    steps = {
        f"step 1: {module} has no Adapter with generate and logits": classes.get("Adapter", set())
        >= {"__init__", "generate", "logits"},
        f"step 2: ENGINES in {ENTRIES} has no entry {name!r}": f'    "{name}": Engine(' in text[ENTRIES],
        f"step 3: the help of --engine does not name {name}": all(name in text[path] for path in HELP),
        f"step 4: the table of engines in {GUIDE} has no column for {name}": name in columns.lower(),
        f"step 5: {TYPES} does not list {imported} among the packages without types": all(
            f'"{package}.*"' in untyped for package in imported
        ),
    }
    return [step for step, done in steps.items() if not done]


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_is_complete(name: str) -> None:
    assert forgotten(name, ENGINES[name], ROOT) == []
