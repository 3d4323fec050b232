"""The benchmark of decoding, in its smallest form."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import decoding_speed
from gqa_convert.attention.decoding import cuda


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["decoding_speed", *arguments])
    decoding_speed.main()


def test_without_a_gpu_it_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, "--device", "cuda")
    assert stopped.value.code == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "torch finds no GPU here" in err


SMALLEST = (
    *("--dtypes", "float32", "--batches", "1", "--groups", "4", "--lengths", "128", "--cold", "1"),
    *("--step-groups", "--least", "2", "--budget", "0"),
)


def rows_of_attention(page: Path) -> list[list[str]]:
    lines = page.read_text(encoding="utf-8").split("## Whole steps")[0].splitlines()
    return [line.strip("| ").split(" | ") for line in lines if line.startswith("|") and "---" not in line]


def test_a_table_of_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    run(monkeypatch, *SMALLEST, "--output", str(tmp_path / "x.json"), "--table", str(tmp_path / "x.md"))
    torch.set_num_threads(threads)
    (cell,) = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))["cells"]
    assert set(cell["milliseconds"]) == {"gqa", "gqa without llvmlite", "sdpa", "read"}
    header, row = rows_of_attention(tmp_path / "x.md")
    assert len(header) == len(row) == 8


def test_a_table_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the CPU in its place, on which the operator also has a kernel."""
    on_cpu = decoding_speed.attention_calls

    def calls(cell: Any, cold: int, _: torch.device) -> Any:
        made = on_cpu(cell, cold, torch.device("cpu"))
        made["gqa without Triton"] = made.pop("gqa without llvmlite")
        return made | dict.fromkeys(("kernel", "read by sum", "read by copy"), made["gqa"])

    monkeypatch.setattr(decoding_speed, "attention_calls", calls)
    monkeypatch.setattr(decoding_speed, "chosen_device", lambda asked: asked)
    monkeypatch.setattr(decoding_speed, "processor", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(cuda, "ready", True)
    threads = torch.get_num_threads()
    output = ("--output", str(tmp_path / "x.json"), "--table", str(tmp_path / "x.md"))
    run(monkeypatch, *SMALLEST, "--device", "cuda", "--threads", "2", *output)
    torch.set_num_threads(threads)
    (cell,) = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))["cells"]
    assert set(cell["milliseconds"]) == {"gqa", "gqa without Triton", "sdpa", "read", "kernel"}
    header, row = rows_of_attention(tmp_path / "x.md")
    assert len(header) == len(row) == 9
    assert "\n## Attention\n" in (tmp_path / "x.md").read_text(encoding="utf-8")
    monkeypatch.setattr(cuda, "ready", False)
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, *SMALLEST, "--device", "cuda")
    assert stopped.value.code == 1
