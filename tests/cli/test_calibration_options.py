"""Options of calibration and the device: what a dry run says, and mistakes."""

import json
import re
from pathlib import Path

import pytest

from gqa_convert.demo import CHECKPOINT as MODEL
from tests.helpers.command_line import run


def test_mistakes(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for arguments, words in (
        (["-n", "3", "-m", "fit"], ["--calibration", "factor"]),
        (["-n", "3", "-m", "mean", "-c", __file__], ["--calibration", "mean", "fit"]),
        (
            ["-n", "3", "-m", "factor", "--calibration-length", "64"],
            ["--calibration-length 64", "needs calibration text"],
        ),
        (["-n", "3", "--calibration-tokens", "500"], ["--calibration-tokens 500", "--calibration"]),
        (["-n", "3", "-m", "mean", "--kl-steps", "5"], ["--kl-steps 5", "--calibration"]),
        (["-n", "3", "-m", "factor", "-c", __file__, "--kl-steps", "5"], ["--kl-steps 5", "factor", "fit"]),
        (["-n", "3", "-c", __file__, "--kl-steps", "-1"], ["--kl-steps -1"]),
        (
            ["-n", "3", "-c", __file__, "--calibration-tokens", "90000", "--kl-steps", "5", "--no-mix"],
            ["--kl-steps 5", "more text"],
        ),
        (["-n", "3", "-c", str(tmp_path / "none.txt")], ["none.txt"]),
        (["-n", "3", "-c", __file__, "--calibration-tokens", "0"], ["--calibration-tokens is 0"]),
    ):
        result = run("convert", MODEL, out, *arguments)
        assert result.returncode == 2, (arguments, result.stderr)
        assert len(result.stderr.splitlines()) == 1, result.stderr
        assert all(word in result.stderr for word in words), result.stderr
        assert list(tmp_path.iterdir()) == []


def test_plan_says_it() -> None:
    options = ("--calibration", "text.txt", "--calibration-tokens", "4096", "--fit-steps", "10", "--kl-steps", "0")
    shown = run("convert", MODEL, "--groups", "2", *options, "--dry-run")
    assert (shown.returncode, shown.stderr) == (0, "")
    line = r"^needs: +about [\d.]+ (MiB|GiB) of memory on cpu, [\d.]+ MB of disk \(fit on 4,096 tokens\)$"
    assert re.search(line, shown.stdout, re.MULTILINE), shown.stdout
    as_json = json.loads(run("convert", MODEL, "--groups", "2", "--json", "--dry-run").stdout)
    assert as_json["estimate"]["work"] == "factor on 4,096 tokens"
    fields = {"work", "layers", "memory_bytes", "disk_bytes", "rewritten_bytes", "tokens", "device"}
    assert set(as_json["estimate"]) == fields


@pytest.mark.parametrize("command", ["convert", "inspect"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--calibration", "t.txt", "--device", "cuda:99"), "--device is cuda:99, and"),
        (("--calibration", "t.txt", "--device", "tpu"), "--device 'tpu' is"),
        (("--calibration", "t.txt", "--device", "cpu,cpu"), "--device 'cpu,cpu' is neither the CPU nor a GPU"),
        (("--calibration", "t.txt", "--device", "meta"), "--device 'meta' is neither the CPU nor a GPU"),
    ],
)
def test_devices_that_are_not_there(command: str, options: tuple[str, ...], words: str, tmp_path: Path) -> None:
    place = (tmp_path / "out",) if command == "convert" else ()
    groups = () if command == "inspect" else ("--groups", "2")
    refused = run(command, MODEL, *place, *groups, *options)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.count("\n") == 1
    assert words in refused.stderr
    assert not list(tmp_path.iterdir())
