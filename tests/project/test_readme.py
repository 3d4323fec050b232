"""What the README promises is what is there."""

import ast
import json
import re
import runpy
import statistics
import sys
import tomllib
from pathlib import Path

import pytest

from gqa_convert.families.table import FAMILIES, REWRITTEN

ROOT = Path(__file__).parents[2]
PART_OF = {"jinja2": "markupsafe", "pydantic": "pydantic_core", "transformers": "tokenizers"}
"""Packages that another one requires and has in its interface."""
README = (ROOT / "README.md").read_text(encoding="utf-8")
REAL = json.loads((ROOT / "docs" / "results" / "real.json").read_text(encoding="utf-8"))


def test_ci_runs_the_readmes_test_command_to_the_letter() -> None:
    commands = re.findall(r"```sh\n(.*)\n```", README)
    assert len(commands) == 2
    assert commands[1] in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()


def runs_late(node: ast.AST) -> bool:
    """Whether imports inside do not run with the module: in a function, or for type checkers alone."""
    checked = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return checked or isinstance(node, ast.FunctionDef)


def test_what_is_imported_is_installed() -> None:
    """What the package needs it requires; what an extra brings is imported only where it is used."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in requirements}

    required = names(project["dependencies"]) | {"yaml", "gqa_convert"}
    required |= {part for package, part in PART_OF.items() if package in required}
    extra = names(
        [line for group, lines in project["optional-dependencies"].items() if group != "dev" for line in lines]
    )
    # files that cannot do without an extra, and are imported late themselves
    derived = {}
    elsewhere = {"vllm", "llama_cpp"}  # engines that run in environments of their own
    for path in (ROOT / "gqa_convert").rglob("*.py"):
        own = elsewhere if path.parent.name == "serving" else set()
        at_once = derived.get(path.name, set())
        tree = ast.parse(path.read_text(encoding="utf-8"))
        late = {id(part) for node in ast.walk(tree) if runs_late(node) for part in ast.walk(node)}
        for node in ast.walk(tree):
            imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            imported += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            known = required | sys.stdlib_module_names | (extra | own if id(node) in late else at_once)
            if id(node) not in late and path.name not in derived:
                assert not {f"{name.rpartition('.')[2]}.py" for name in imported} & set(derived), path
            assert {name.split(".")[0] for name in imported} <= known, f"{path}: {imported}"


def test_links_lead_somewhere() -> None:
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_the_number_of_families() -> None:
    native = [family for family in FAMILIES.values() if family.native]
    own = [name for name, family in FAMILIES.items() if family.modeling and not family.is_converted]
    for words in (
        f"{len(native)} causal-LM types",
        f"{len(native) - 1} other types",
        f"{len(own)} types without one",
        f"{len(REWRITTEN)} older types with custom code",
    ):
        assert words in README, f"README.md states another number of types: it must say '{words}'"


def real_losses(method: str) -> list[str]:
    """On prose, code and chat, as the README writes them; averaged over seeds."""
    if method == "source":
        scores = [REAL["models"]["smollm2"]["scores"]]
    else:
        scores = [cell for cell in REAL["cells"] if cell["method"] == method]
    kinds = ("prose", "code", "chat")
    return [f"{statistics.mean(each['loss'][kind]['512']['loss'] for each in scores):.2f}" for kind in kinds]


def needles(method: str) -> list[str]:
    """The shares found in texts of 512 and of 4,096 tokens; empty where they were not measured."""
    scores = [REAL["models"]["smollm2"]["scores"]]
    if method != "source":
        scores = [cell for cell in REAL["cells"] if cell["method"] == method]
    if "retrieval" not in scores[0]:
        return ["", ""]
    return [
        f"{statistics.mean(each['retrieval'][length]['found'] for each in scores):.0%}" for length in ("512", "4096")
    ]


@pytest.mark.parametrize(
    ("row", "method"),
    [
        ("source", "source"),
        ("`--method mean`", "mean"),
        ("`convert` without text", "default"),
        ("`fit`, closed forms only (`--fit-steps 0 --kl-steps 0`)", "fit-closed"),
        ("`fit` without its last stage (`--kl-steps 0`)", "fit-gradient"),
        ("`fit`, the default with `--calibration`", "fit"),
    ],
)
def test_the_table_states_what_was_measured(row: str, method: str) -> None:
    lines = [line.replace("*", "") for line in README.splitlines() if line.startswith("|")]
    (cells,) = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith(f"| {row} |")]
    assert cells[3:] == [*real_losses(method), *needles(method)]


def test_the_table_of_speech_states_what_was_measured() -> None:
    """Means over seeds."""
    speech = json.loads((ROOT / "docs" / "results" / "whisper.json").read_text(encoding="utf-8"))
    scores = {"Whisper base": [speech["models"]["whisper-base"]["scores"]]}
    for cell in speech["cells"]:
        name = f"{cell['groups']} K/V head{'s' if cell['groups'] > 1 else ''}, `{cell['method']}`"
        scores.setdefault(name.replace("`mean`", "`--method mean`"), []).append(cell)
    rows = [line.replace("*", "") for line in README.splitlines() if re.match(r"\| (Whisper|\W*\d K/V)", line)]
    assert len(rows) == 4
    for row in rows:
        name, _, loss, errors = (cell.strip() for cell in row.split("|")[1:-1])
        cells = scores[name]
        assert loss == f"{statistics.mean(cell['loss'] for cell in cells):.2f}"
        assert errors == f"{statistics.mean(cell['word_errors'] for cell in cells):.1%}"


def test_the_first_sentence_states_what_was_measured() -> None:
    source, fitted, mean = (real_losses(method)[0] for method in ("source", "fit", "mean"))
    for page in (README, (ROOT / "docs" / "index.md").read_text(encoding="utf-8")):
        first = " ".join(page.split("<picture>")[0].split())
        assert f"rises from {source} to {fitted} nats per token" in first
        assert f"raises it to {mean}." in first


def test_the_plot_shows_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both variants are drawn anew, and those that the README shows have the same labels."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["readme_plot", str(tmp_path)])
    runpy.run_module("benchmarks.real.readme_plot", run_name="__main__")
    labels = [loss for method in ("mean", "default", "fit") for loss in real_losses(method)]
    labels += [f"source {loss}" for loss in real_losses("source")] + ["23,040 B", "7,680 B"]
    for theme in ("light", "dark"):
        kept = ROOT / "docs" / "results" / f"real-loss-{theme}.svg"
        assert str(kept.relative_to(ROOT)) in README
        for drawn in (kept, tmp_path / kept.name):
            text = drawn.read_text(encoding="utf-8")
            assert [label for label in labels if label not in text] == []


def test_it_stays_short() -> None:
    assert len(README.splitlines()) <= 150
