"""The benchmark on a real model, with the bundled one in its place."""

import json
from pathlib import Path
from typing import Any

import pytest

import gqa_convert
from benchmarks.real import __main__ as real
from benchmarks.real.report import blocks
from benchmarks.real.text import KINDS, modules, page_text
from tests.helpers.command_line import run

DEMO = Path(gqa_convert.__file__).parent / "demo_checkpoint"


def in_a_fork(*words: str | Path) -> tuple[dict[str, Any], dict[str, float]]:
    done = run(*words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), {"minutes": 0.5, "core_minutes": 0.4}


@pytest.mark.slow
def test_each_method_has_a_row_and_nothing_is_measured_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "smollm2").symlink_to(DEMO)
    (tmp_path / "text").mkdir()
    (text, *_) = (each for each in modules(held_out=True) if len(each) > 20_000)
    for name in (*(f"{kind}-held-out" for kind in KINDS), "mixed-calibration"):
        (tmp_path / "text" / f"{name}.jsonl").write_text(json.dumps({"text": text}) + "\n")
    monkeypatch.setattr(real, "gqa_convert", in_a_fork)
    command = [
        "smollm2",
        "--folder",
        str(tmp_path),
        "--output",
        str(tmp_path / "real.json"),
        "--tokens",
        "600",
        "--windows",
        "256",
    ]
    command += [
        "--methods",
        "mean",
        "factor-calibrated",
        "--seeds",
        "0",
        "--calibration-tokens",
        "500",
    ]
    real.main([*command, "--lengths", "512", "--questions", "1"])
    measured = (tmp_path / "real.json").read_text()
    data = json.loads(measured)
    monkeypatch.setattr(real, "gqa_convert", lambda *_: pytest.fail("this was measured already"))
    real.main([*command, "--lengths", "512", "--questions", "1"])
    assert json.loads((tmp_path / "real.json").read_text()) == data
    source = data["models"]["smollm2"]["scores"]["loss"]["prose"]["256"]
    mean, factor = (cell["loss"]["prose"]["256"] for cell in data["cells"])
    assert source["loss"] < factor["loss"] < mean["loss"]
    assert mean["excess"] == pytest.approx(mean["loss"] - source["loss"], abs=1e-4)
    assert 0 < factor["kl"] < mean["kl"]
    assert data["cells"][1]["seed"] == 0
    found = data["cells"][0]["retrieval"]["512"]
    assert found["questions"] % len(found["by_kind"]) == 0


def test_tables() -> None:
    def loss(value: float, kl: float) -> dict[str, Any]:
        scores = {
            "loss": value,
            "loss_error": 0.1,
            "excess": kl,
            "excess_error": 0.01,
            "kl": kl,
            "kl_error": 0.02,
        }
        return {kind: {"512": scores, "2048": scores} for kind in KINDS}

    asked = {
        "512": {"found": 0.8, "by_kind": {"needles": 0.6, "copying": 0.8}},
        "1024": {"found": 0.6, "by_kind": {"needles": 0.4, "copying": 0.6}},
    }
    half = {
        length: {
            "found": each["found"] / 2,
            "by_kind": {kind: share / 2 for kind, share in each["by_kind"].items()},
        }
        for length, each in asked.items()
    }
    cells = [
        {"method": "mean", "minutes": 0.1, "loss": loss(6.0, 3.0)},
        {
            "method": "fit",
            "calibration": "code",
            "minutes": 9.0,
            "loss": loss(3.2, 0.2),
            "retrieval": half,
        },
        {
            "method": "fit",
            "calibration": "code",
            "minutes": 8.0,
            "loss": loss(3.4, 0.4),
            "retrieval": asked,
        },
    ]
    source = {"loss": loss(3.0, 0.0), "retrieval": asked}
    other = {"model": "qwen-0.5b", "method": "fit", "minutes": 1.0, "loss": loss(9.0, 7.0)}
    models = {"smollm2": {"scores": source}, "qwen-0.5b": {"scores": source}}
    made = blocks(
        {"models": models, "cells": [*({"model": "smollm2"} | cell for cell in cells), other]}
    )
    (row,) = [line for line in made["smollm2 results"].splitlines() if "| fit, code |" in line]
    assert row.startswith("| fit, code | 8.0 to 9.0 | 3.000 -> 3.300, 90.0% |")
    assert "| 0.300 ± 0.020 (0.200 to 0.400) |" in row
    assert row.endswith("| 70% -> 52%, recovery 75% |")


def test_the_text_of_a_page() -> None:
    page = (
        "<head><title>t</title></head><nav>menu</nav><h1>A &amp; B</h1><p>one\n "
        "<b>two</b></p><script>x<y</script><li>three"
    )
    assert page_text(page) == "A & B\n\none two\n\nthree"
