"""Every engine has everything that docs/developing.md asks for, and a forgotten step is named."""

import ast
import re
import shutil
from pathlib import Path

import pytest

from gqa_convert.families import engines as plan
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


def test_every_engine_that_a_dry_run_lists_can_be_checked() -> None:
    assert {name.lower() for name in plan.ENGINES} - {"transformers"} == set(ENGINES)


def test_an_engine_by_the_guide(tmp_path: Path) -> None:
    """Each step of the guide, with a fake engine in a copy of the files, removes the line that names it."""
    for path in (ENTRIES, GUIDE, TYPES, *HELP):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, tmp_path / path)
    guide = (ROOT / "docs" / "developing.md").read_text(encoding="utf-8")
    module, entry = re.findall(r"```text\n(.*?)```", guide, re.DOTALL)
    ((name, engine),) = eval(f"{{{entry}}}", {"_HERE": "gqa_convert.serving", "Engine": Engine}).items()

    def edit(path: Path, old: str, new: str) -> None:
        content = (tmp_path / path).read_text(encoding="utf-8")
        assert old in content
        (tmp_path / path).write_text(content.replace(old, new, 1), encoding="utf-8")

    def steps() -> list[str]:
        return [line.split(":")[0] for line in forgotten(name, engine, tmp_path)]

    assert steps() == ["step 1", "step 2", "step 3", "step 4"]
    (tmp_path / "gqa_convert/serving/example.py").write_text(module, encoding="utf-8")
    assert steps() == ["step 2", "step 3", "step 4", "step 5"]
    edit(ENTRIES, "ENGINES = {\n", f"ENGINES = {{\n{entry}")
    for path in HELP:
        edit(path, "llama.cpp or vllm", "llama.cpp, vllm or example")
    edit(GUIDE, "| | llama.cpp", "| | Example 1.0 | llama.cpp")
    edit(TYPES, '"vllm.*"', '"vllm.*", "example_engine.*"')
    assert steps() == []
