"""Every engine has everything that docs/adding-an-engine.md asks for, and a forgotten step is named."""

import ast
import re
import shutil
from pathlib import Path

import pytest

from gqa_convert.families.engines import ENGINES
from gqa_convert.serving.client import CLIENTS, Client

ROOT = Path(__file__).resolve().parents[2]
CLIENT, PLAN = Path("gqa_convert/serving/client.py"), Path("gqa_convert/families/engines.py")
HELP, GUIDE = Path("gqa_convert/cli/check_serving.py"), Path("docs/serving.md")
FILES = (CLIENT, PLAN, HELP, GUIDE, Path("pyproject.toml"))


def forgotten(client: Client, root: Path) -> list[str]:
    """The steps of docs/adding-an-engine.md that an engine lacks in a tree of files."""
    module = Path("gqa_convert/serving") / f"{client.module.rpartition('.')[2]}.py"
    text = {path: (root / path).read_text(encoding="utf-8") for path in FILES}
    tree = ast.parse((root / module).read_text(encoding="utf-8")) if (root / module).is_file() else ast.parse("")
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    entries = re.findall(r"\bClient\(\s*\"([^\"]+)\"", text[CLIENT])
    named = re.search(r"^ENGINES = \((.*)\)$", text[PLAN], re.MULTILINE)
    listed = re.findall(r'"([^"]+)"', named[1] if named else "")
    tables = {part: text[PLAN].count(f"\n    {part}=") for part in [(client.listed_as or "").replace(".", "_")]}
    (header,) = re.findall(r"^\| \| .*llama\.cpp.*$", text[GUIDE], re.MULTILINE)
    help_ = re.search(r'help="Engine to run: ([^;]*);', text[HELP])
    typed = re.search(r'^module = \["accelerate.*$', text[Path("pyproject.toml")], re.MULTILINE)
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom) and node.level == 0
            else []
        )
    }
    own = imported & {each.replace("-", "_") for each in client.distributions}
    steps = {
        f"step 1: {module} has no function answer(request)": "answer" in functions,
        f"step 2: CLIENTS in {CLIENT} has no entry {client.name!r}": client.name in entries,
        f"step 3: {PLAN} has no {client.listed_as!r} in ENGINES: add it, or state listed_as=None": (
            client.listed_as is None or client.listed_as in listed
        ),
        f"step 3: {PLAN} has no model types of {client.listed_as!r} in _RUN and _LISTED": (
            client.listed_as is None or all(count >= 2 for count in tables.values())
        ),
        f"step 4: the help of --client in {HELP} does not name {client.name}": (
            help_ is not None and client.name in re.split(r", | or ", help_[1])
        ),
        f"step 5: the table of engines in {GUIDE} has no column for {client.name}": (
            client.name.replace("-", "") in re.sub(r"[ -]", "", header).lower()
        ),
        f"step 6: pyproject.toml does not list {', '.join(own)}.* among the packages without types": (
            typed is not None and all(f'"{name}.*"' in typed[0] for name in own)
        ),
    }
    return [step for step, done in steps.items() if not done]


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_every_engine_is_complete(client: Client) -> None:
    assert forgotten(client, ROOT) == []


def test_every_engine_that_plan_lists_can_be_checked() -> None:
    assert {client.listed_as for client in CLIENTS} - {None} == set(ENGINES) - {"transformers"}


def test_an_engine_by_the_guide(tmp_path: Path) -> None:
    """Each step of the guide, with a fake engine in a copy of the files, removes the line that names it."""
    for path in FILES:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, tmp_path / path)
    guide = (ROOT / "docs" / "adding-an-engine.md").read_text(encoding="utf-8")
    module, entry = re.findall(r"```text\n(.*?)```", guide, re.DOTALL)
    fields = {"_HERE": "gqa_convert.serving", "Client": Client, "__builtins__": {}}
    (client,) = eval(f"({entry})", fields)
    assert client.name == "example"

    def edit(path: Path, old: str, new: str) -> None:
        content = (tmp_path / path).read_text(encoding="utf-8")
        assert old in content
        (tmp_path / path).write_text(content.replace(old, new, 1), encoding="utf-8")

    def steps(listed_as: str | None = None) -> list[str]:
        given = Client(client.name, client.module, client.distributions, client.requirements, listed_as=listed_as)
        return [line.split(":")[0] for line in forgotten(given, tmp_path)]

    assert steps("Example") == ["step 1", "step 2", "step 3", "step 3", "step 4", "step 5"]
    (tmp_path / "gqa_convert/serving/example.py").write_text(module, encoding="utf-8")
    compile(module, "example.py", "exec")
    assert steps() == ["step 2", "step 4", "step 5", "step 6"]
    edit(CLIENT, "CLIENTS = (\n", f"CLIENTS = (\n{entry}")
    assert steps() == ["step 4", "step 5", "step 6"]
    edit(HELP, " or vllm;", ", vllm or example;")
    edit(GUIDE, "| | llama.cpp", "| | Example 1.0 | llama.cpp")
    edit(Path("pyproject.toml"), '"vllm.*"', '"vllm.*", "example_engine.*"')
    assert steps() == []
    edit(PLAN, '"llama.cpp")', '"llama.cpp", "Example")')
    assert steps("Example") == ["step 3"]
    for start in ("_RUN = _table(\n", "_LISTED = _table(\n"):
        edit(PLAN, start, f'{start}    Example="llama",\n')
    assert steps("Example") == []
