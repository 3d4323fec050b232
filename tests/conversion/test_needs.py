"""The estimate of what a conversion needs, and the device that it runs on."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import gqa_convert
from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.fit import needs
from gqa_convert.conversion.fit.calibrated import CalibrationOptions
from gqa_convert.conversion.fit.needs import Needs, estimate_needs
from gqa_convert.conversion.plan import make_plan
from tests.helpers.command_line import run

MODEL = Path(gqa_convert.__file__).parent / "demo_checkpoint"


def estimate(method: str = "fit", **options: Any) -> Needs:
    source = None if method in ("mean", "factor") else "text.txt"
    return estimate_needs(make_plan(open_checkpoint(MODEL), 1, method=method), CalibrationOptions(source, **options))


def test_more_text_takes_more_memory() -> None:
    once, twice = estimate(tokens=20_480), estimate(tokens=40_960)
    assert twice.memory_bytes > once.memory_bytes
    assert twice.disk_bytes == once.disk_bytes


def test_the_last_stage_takes_memory() -> None:
    trained = estimate(tokens=2048, sequence_length=512, kl_steps=20)
    layers_alone = estimate(tokens=2048, sequence_length=512, kl_steps=0)
    assert trained.memory_bytes > 1.1 * layers_alone.memory_bytes


def test_inputs_that_do_not_fit_lie_on_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = estimate(tokens=40_960)
    monkeypatch.setattr(needs, "available_memory", lambda _: 1 << 20)
    spilled = estimate(tokens=40_960)
    assert spilled.disk_bytes == kept.disk_bytes + needs.KEPT_BYTES * 40_960 * 192


def test_merged_layers_lie_beside_the_result() -> None:
    mean, factor = estimate("mean"), estimate("factor")
    assert mean.tokens is None
    assert mean.disk_bytes == make_plan(open_checkpoint(MODEL), 1, method="mean").disk_bytes
    assert factor.disk_bytes > mean.disk_bytes


def test_plan_says_it() -> None:
    options = ("--calibration", "text.txt", "--calibration-tokens", "4096", "--fit-steps", "10", "--kl-steps", "0")
    shown = run("convert", MODEL, "--groups", "2", *options, "--dry-run")
    assert (shown.returncode, shown.stderr) == (0, "")
    line = r"^needs: +about [\d.]+ (MiB|GiB) of memory on cpu, [\d.]+ MB of disk \(fit on 4,096 tokens\)$"
    assert re.search(line, shown.stdout, re.MULTILINE), shown.stdout
    as_json = json.loads(run("convert", MODEL, "--groups", "2", "--json", "--dry-run").stdout)
    assert as_json["estimate"]["work"] == "factor on 4,096 tokens"
    assert set(as_json["estimate"]) == {"work", "layers", "memory_bytes", "disk_bytes", "tokens", "device"}


def test_a_device_without_text() -> None:
    for command in (("convert", MODEL, "--groups", "2", "--dry-run", "--method", "factor"), ("inspect", MODEL)):
        refused = run(*command, "--device", "cpu")
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "--device cpu needs calibration text" in refused.stderr
    built_in = run("convert", MODEL, "--groups", "2", "--device", "cpu", "--dry-run")
    assert built_in.returncode == 0


@pytest.mark.parametrize("command", ["convert", "inspect"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--calibration", "t.txt", "--device", "cuda:99"), "--device is cuda:99, and"),
        (("--calibration", "t.txt", "--device", "tpu"), "--device 'tpu' is"),
        (("--calibration", "t.txt", "--device", "cpu,cpu"), "--device 'cpu,cpu' is not a device"),
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
