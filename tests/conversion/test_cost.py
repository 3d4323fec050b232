"""The estimate of a conversion's cost before it begins, and the device that it runs on."""

import json
import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

import gqa_convert
from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.cli import app
from gqa_convert.cli.console.estimate import estimate_line
from gqa_convert.conversion.fit import cost, defaults, probe, rates
from gqa_convert.conversion.fit.calibrated import CalibrationOptions
from gqa_convert.conversion.fit.cost import CostEstimate, estimate_cost
from gqa_convert.conversion.fit.probe import probed_rates
from gqa_convert.conversion.fit.rates import LayerSizes, Rates, _feed_forward, measured_rates
from gqa_convert.conversion.plan import make_plan
from gqa_convert.text import sources
from gqa_convert.text.stdlib_text import source_files
from tests.helpers.command_line import run

MODEL = Path(gqa_convert.__file__).parent / "demo_checkpoint"
LINE = r"^Estimate on this machine: about \d+ \w+, [\d.]+ (MiB|GiB) of memory, [\d.]+ MB of disk \((.*)\)$"


def estimate(method: str = "fit", **options: Any) -> CostEstimate:
    source = None if method in ("mean", "factor") else "text.txt"
    return estimate_cost(make_plan(open_checkpoint(MODEL), 1, method=method), CalibrationOptions(source, **options))


def test_work_costs_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the text and twice the steps take about twice the time, at the rates of one measurement."""
    made: list[Rates] = []

    def measured_once(*given: Any) -> Rates:
        made.append(made[0] if made else measured_rates(*given))
        return made[-1]

    monkeypatch.setattr(cost, "measured_rates", measured_once)
    once = estimate(tokens=20_480, steps=40, kl_steps=20)
    twice = estimate(tokens=40_960, steps=80, kl_steps=40)
    for stage in ("layers", "last_stage"):
        assert twice.seconds_by_stage[stage] / once.seconds_by_stage[stage] == pytest.approx(2.0, rel=0.15)
    assert twice.memory_bytes > once.memory_bytes
    assert twice.disk_bytes == once.disk_bytes
    assert math.isfinite(once.seconds)
    assert estimate(tokens=20_480, steps=40, kl_steps=0).seconds_by_stage["last_stage"] == 0.0
    assert len(made) == 3


@pytest.mark.parametrize("reduced", [False, True])
def test_the_quick_rates_are_those_of_a_layer(reduced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a factor that a user of a rough estimate would accept, where every operation of a product takes equally
    long.
    """
    operation = 1e-9

    def counted(_: Any, compute: Callable[[], Any]) -> float:
        with FlopCounterMode(display=False) as counter:
            compute()
        return operation * int(counter.get_total_flops())

    monkeypatch.setattr(rates._Clock, "seconds", counted)
    for module in (rates, probe):
        monkeypatch.setattr(module, "product_rate", lambda *_: operation)
    sizes = LayerSizes(
        hidden_size=512,
        heads=8,
        kv_heads=8,
        trained_kv_heads=2,
        key_head_dim=64,
        value_head_dim=64,
        feed_forward=3 * 512 * 1024,
        vocabulary=4096,
        block=256,
        batch=512,
    )
    precision = partial(torch.autocast, "cpu", torch.bfloat16) if reduced else nullcontext
    quick, timed = probed_rates(sizes, reduced=reduced), measured_rates(sizes, "cpu", precision)
    shares = probe._REDUCED if reduced else probe._FULL
    for rate in fields(Rates):
        found, expected = getattr(quick, rate.name), getattr(timed, rate.name)
        assert 1 / 4 < found / expected < 4, rate.name
        if reduced and rate.name == "attention_gradient":  # whose forward products are made again on the way back
            continue
        if rate.name in shares:  # backward has one product for each of forward: with the weights or with the states
            passes = 2 if rate.name.endswith("_gradient") else 1
            assert expected == pytest.approx(passes * found / shares[rate.name], rel=0.2), rate.name


def test_a_layers_feed_forward_is_timed_by_its_products() -> None:
    """Twice the columns, of which a part is timed, take twice the time: nothing else is multiplied with them."""
    sizes = LayerSizes(
        hidden_size=2048,
        heads=1,
        kv_heads=1,
        trained_kv_heads=1,
        key_head_dim=8,
        value_head_dim=8,
        feed_forward=3 * 2048 * 512,
        vocabulary=8,
        block=64,
        batch=64,
    )
    whole = replace(sizes, feed_forward=16 * sizes.feed_forward)
    once, more = (_feed_forward(each, 1e6, "cpu") for each in (sizes, whole))
    assert more.scale == pytest.approx(16 * once.scale)
    assert once.scale == 1 / sizes.batch  # 512 columns, whatever the budget


def test_copies_cost_their_bytes() -> None:
    mean, factor = estimate("mean"), estimate("factor")
    assert mean.tokens is None
    assert mean.seconds < 5
    assert mean.disk_bytes == make_plan(open_checkpoint(MODEL), 1, method="mean").disk_bytes
    assert factor.disk_bytes > mean.disk_bytes  # merged layers lie beside the result


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "1 second"), (42.0, "40 seconds"), (1500.0, "25 minutes"), (12_000.0, "3 hours"), (400_000.0, "5 days")],
)
def test_the_line(seconds: float, text: str) -> None:
    found = CostEstimate(
        work="fit on 24,576 tokens",
        seconds_by_stage={"layers": seconds},
        layers=30,
        memory_bytes=round(3.1 * 2**30),
        disk_bytes=300_000_000,
        tokens=24_576,
        device="cpu",
    )
    assert estimate_line(found) == (
        f"Estimate on this machine: about {text}, 3.1 GiB of memory, 300.0 MB of disk (fit on 24,576 tokens)"
    )


def test_plan_says_it() -> None:
    options = ("--calibration", "text.txt", "--calibration-tokens", "4096", "--fit-steps", "10", "--kl-steps", "0")
    shown = run("plan", MODEL, "--groups", "2", *options)
    assert (shown.returncode, shown.stderr) == (0, "")
    found = re.match(LINE, shown.stdout.splitlines()[-1])
    assert found, shown.stdout
    assert found[2] == "fit on 4,096 tokens"
    as_json = json.loads(run("plan", MODEL, "--groups", "2", "--json").stdout)
    assert as_json["estimate"]["work"] == "factor on 4,096 tokens"
    assert set(as_json["estimate"]) == {
        "work",
        "seconds",
        "seconds_by_stage",
        "layers",
        "memory_bytes",
        "disk_bytes",
        "tokens",
        "device",
    }


def test_convert_says_it_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defaults, "BUILT_IN_TOKENS", 512)
    monkeypatch.setattr(sources, "source_files", lambda held_out: source_files(held_out=held_out)[::20])
    done = CliRunner().invoke(app, ["convert", str(MODEL), str(tmp_path / "out"), "--groups", "2"])
    assert done.exit_code == 0  # on the built-in text
    assert re.match(LINE, done.stderr.splitlines()[0]), done.stderr
    for option in ("--quiet", "--json"):  # a copy takes a second, which is not worth a line
        short = run("convert", MODEL, tmp_path / f"mean{option}", "--groups", "2", "--method", "mean", option)
        assert (short.returncode, short.stderr) == (0, "")


def test_devices_divide_the_text_and_not_the_closed_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of 2,048 tokens has four blocks of 512. On one machine each process loads the model."""

    def at_rates(**given: float) -> dict[int, CostEstimate]:
        rates = Rates(**(dict.fromkeys((field.name for field in fields(Rates)), 1e-9) | given))
        monkeypatch.setattr(cost, "measured_rates", lambda *_: rates)
        options: dict[str, Any] = {"tokens": 20_480, "sequence_length": 512, "steps": 40, "kl_steps": 20}
        return {count: estimate(**options, device=",".join(["cpu"] * count)) for count in (1, 2, 4, 5)}

    made, undemanding = at_rates(double=1e-8), at_rates(double=0.0)
    for count in (2, 4):
        for stage in ("layers", "last_stage"):
            whole = undemanding[1].seconds_by_stage[stage]
            assert undemanding[count].seconds_by_stage[stage] == pytest.approx(whole / count)
        assert made[count].seconds_by_stage["layers"] > 1.05 * made[1].seconds_by_stage["layers"] / count
    assert made[5].seconds_by_stage["last_stage"] > 0.9 * made[4].seconds_by_stage["last_stage"]
    assert made[2].memory_bytes > 1.5 * made[1].memory_bytes
    assert made[2].device == "cpu,cpu"
    assert "on 2 devices" in estimate_line(made[2])


def test_a_device_without_text() -> None:
    for command in (("plan", "--method", "factor"), ("inspect",)):
        refused = run(command[0], MODEL, "--groups", "2", *command[1:], "--device", "cpu")
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "--device cpu needs calibration text" in refused.stderr
    assert run("plan", MODEL, "--groups", "2", "--device", "cpu").returncode == 0  # on the built-in text


@pytest.mark.parametrize("command", ["plan", "convert", "inspect"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--calibration", "t.txt", "--device", "cuda:99"), "--device is cuda:99, and"),
        (("--calibration", "t.txt", "--device", "tpu"), "--device 'tpu' is"),
        (("--calibration", "t.txt", "--device", "meta"), "--device 'meta' is neither the CPU nor a GPU"),
    ],
)
def test_devices_that_are_not_there(command: str, options: tuple[str, ...], words: str, tmp_path: Path) -> None:
    place = (tmp_path / "out",) if command == "convert" else ()
    refused = run(command, MODEL, *place, "--groups", "2", *options)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.count("\n") == 1
    assert words in refused.stderr
    assert not list(tmp_path.iterdir())
