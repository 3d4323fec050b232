"""benchmarks/gpu.py measures every part, and a failure of one command or part costs no other."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu


def errors(found: Any) -> list[Any]:
    """All errors within a result."""
    if isinstance(found, list):
        return [error for each in found for error in errors(each)]
    if not isinstance(found, dict):
        return []
    own = [found["error"]] if "error" in found else []
    return own + [error for each in found.values() for error in errors(each)]


@pytest.mark.slow
def test_the_small_run_measures_every_part(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    command = [sys.executable, "benchmarks/gpu.py", "--small", "--timeout", "400"]
    subprocess.run(
        [*command, "--folder", str(tmp_path / "disk"), "--output", str(output)],
        cwd=gpu.HERE,
        check=True,
        capture_output=True,
    )
    report = json.loads(output.read_text())
    assert errors(report) == []
    assert [row["kv_heads"] for row in report["attention"]] == [32, 8, 4, 1]
    assert [row["kv_heads"] for row in report["decoding"]["result"]["results"]] == [1, 4]
    for name in gpu.ADAPTERS:
        run = report["uptraining"][name]
        assert run["tokens_per_second"] > 0
        assert 0.05 < run["allocated_gb"] < 8
        assert run["losses"][1] < run["losses"][0]
        assert run["estimate"]["result"]["memory_needed"] > 1e8
    assert report["fit"]["bundled model, verified"]["result"]["passed"]
    assert report["fit"]["one layer, dry run"]["result"]["estimate"]["tokens"] == 1000
    assert not list((tmp_path / "disk").iterdir())


def test_a_part_that_fails_leaves_its_error_and_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: gpu.Settings) -> None:
        raise RuntimeError("CUDA error")

    monkeypatch.setitem(gpu.PARTS, "decoding", fail)
    monkeypatch.setitem(gpu.PARTS, "fit", lambda _: {"seconds": 1.0})
    output = tmp_path / "gpu.json"
    gpu.main(
        ["--output", str(output), "--folder", str(tmp_path / "disk"), "--parts", "decoding", "fit"]
    )
    report = json.loads(output.read_text())
    assert report["decoding"]["error"][-1] == "RuntimeError: CUDA error"
    assert report["fit"] == {"seconds": 1.0}


def test_a_command_that_fails_leaves_its_message(tmp_path: Path) -> None:
    settings = gpu.Settings(folder=tmp_path, small=True, timeout=100)
    found = gpu.run(settings, "inspect", tmp_path / "absent", "--calibration", "text.txt")
    assert found["exit_code"] == 2
    assert "absent" in " ".join(found["error"])
    assert "result" not in found


def test_a_command_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    found = gpu.run(gpu.Settings(folder=tmp_path, small=True, timeout=0.02), "inspect", gpu.DEMO)
    assert found["exit_code"] == -9
    assert found["error"][-1] == "ended after 0 s"
    assert found["seconds"] < 30
