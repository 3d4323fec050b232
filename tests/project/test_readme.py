"""What the README promises is what is there."""

import json
import re
import runpy
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

from gqa_convert.families.table import FAMILIES

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
REAL = json.loads((ROOT / "docs" / "results" / "real.json").read_text(encoding="utf-8"))


def test_ci_runs_the_readmes_test_command_to_the_letter() -> None:
    commands = re.findall(r"```sh\n(.*)\n```", README)
    assert len(commands) == 2
    assert commands[1] in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()


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
    ):
        assert words in README, f"README.md states another number of types: it must say '{words}'"


def cells_of(method: str, model: str = "smollm2") -> list[dict[str, Any]]:
    """Of all seeds."""
    return [cell for cell in REAL["cells"] if (cell["model"], cell["method"]) == (model, method)]


def real_losses(method: str, model: str = "smollm2") -> list[str]:
    """On prose, code and chat, as the README writes them; averaged over seeds."""
    if method == "source":
        scores = [REAL["models"][model]["scores"]]
    else:
        scores = cells_of(method, model)
    kinds = ("prose", "code", "chat")
    return [
        f"{statistics.mean(each['loss'][kind]['512']['loss'] for each in scores):.2f}"
        for kind in kinds
    ]


def facts(method: str) -> list[str]:
    """The shares found in texts of 512 and of 4,096 tokens; empty where they were not measured."""
    scores = [REAL["models"]["smollm2"]["scores"]]
    if method != "source":
        scores = cells_of(method)
    if "retrieval" not in scores[0]:
        return ["", ""]
    return [
        f"{statistics.mean(each['retrieval'][length]['found'] for each in scores):.0%}"
        for length in ("512", "4096")
    ]


@pytest.mark.parametrize(
    ("row", "method"),
    [
        ("source", "source"),
        ("`--method mean`", "mean"),
        ("`convert` without text", "default"),
        ("`fit` without gradient steps (`--fit-steps 0 --kl-steps 0`)", "closed"),
        ("`fit` without its last stage (`--kl-steps 0`)", "layers"),
        ("`fit`, the default with `--calibration`", "fit"),
    ],
)
def test_the_table_states_what_was_measured(row: str, method: str) -> None:
    lines = [line.replace("*", "") for line in README.splitlines() if line.startswith("|")]
    (cells,) = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in lines
        if line.startswith(f"| {row} |")
    ]
    assert cells[3:] == [*real_losses(method), *facts(method)]


def test_the_sentence_on_qwen_states_what_was_measured() -> None:
    source, mean, layers = (
        real_losses(method, "qwen-0.5b") for method in ("source", "mean", "layers")
    )
    text = " ".join(README.split())
    for place, kind, word in ((1, "code", "mean pooling: "), (0, "prose", "")):
        assert re.search(
            rf"on {kind} (rises )?from {source[place]} to {layers[place]} \({word}{mean[place]}",
            text,
        ), kind


def test_the_table_of_speech_states_what_was_measured() -> None:
    """Means over seeds."""
    speech = json.loads((ROOT / "docs" / "results" / "whisper.json").read_text(encoding="utf-8"))
    scores = {"Whisper base": [speech["models"]["whisper-base"]["scores"]]}
    for cell in speech["cells"]:
        name = (
            f"{cell['kv_heads']} K/V head{'s' if cell['kv_heads'] > 1 else ''}, `{cell['method']}`"
        )
        scores.setdefault(name.replace("`mean`", "`--method mean`"), []).append(cell)
    rows = [
        line.replace("*", "")
        for line in README.splitlines()
        if re.match(r"\| (Whisper|\W*\d K/V)", line)
    ]
    assert len(rows) == 4
    for row in rows:
        name, _, loss, errors = (cell.strip() for cell in row.split("|")[1:-1])
        cells = scores[name]
        assert loss == f"{statistics.mean(cell['loss'] for cell in cells):.2f}"
        assert errors == f"{statistics.mean(cell['word_errors'] for cell in cells):.1%}"


def test_the_first_sentence_states_what_was_measured() -> None:
    source, fitted, mean = (real_losses(method)[0] for method in ("source", "fit", "mean"))
    first = " ".join(README.split("<picture>")[0].split())
    assert f"rises from {source} to {fitted}." in first
    assert f"raises this loss on prose to {mean} nats per token." in first


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
