"""The estimate of the hours that the work on calibration text takes."""

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.estimate import estimate_needs
from gqa_convert.conversion.hours import forward_operations
from gqa_convert.conversion.options import CalibrationOptions
from gqa_convert.conversion.plan import Plan, make_plan
from gqa_convert.demo import CHECKPOINT
from gqa_convert.runtime.machine import STATED
from gqa_convert.runtime.messages import about
from gqa_convert.runtime.speed import GPUS, device_speed, known_gpu
from tests.helpers.tiny import make_checkpoint

BLOCK = 64
FEW = 2
"""Tokens of a block in which pairs of tokens take little."""


def plan_of(source: Path, groups: int = 3, method: str = "fit") -> Plan:
    return make_plan(open_checkpoint(source), groups, method=method)


def options(**stated: Any) -> CalibrationOptions:
    return CalibrationOptions("text.txt", **{"sequence_length": BLOCK, "device": "cpu"} | stated)


def counted(model: Any) -> int:
    """The operations that torch counts in a forward pass of a few tokens."""
    experts = {torch.ops.aten._grouped_mm: lambda left, right, *_, **__: 2 * prod(left) * right[-1]}
    with FlopCounterMode(display=False, custom_mapping=experts) as counter, torch.no_grad():
        model(input_ids=torch.zeros(1, FEW, dtype=torch.long), use_cache=False)
    return counter.get_total_flops()


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_a_forward_pass_takes_what_torch_counts(name: str, tmp_path: Path) -> None:
    source = make_checkpoint(name, tmp_path / "source")
    model = AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager")
    estimated = FEW * forward_operations(make_plan(open_checkpoint(source), 1))
    assert estimated == pytest.approx(counted(model), rel=0.02)


def test_each_part_of_the_work_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STATED, json.dumps({"speed": 1e12, "memory": 64 << 30}))
    plan = plan_of(CHECKPOINT)

    def taken(method: str = "fit", **stated: Any) -> float:
        found = estimate_needs(plan_of(CHECKPOINT, method=method), options(**stated)).hours
        assert found is not None
        return found

    layers = taken(kl_steps=0, mix=False)
    assert taken("factor") < taken(kl_steps=0, mix=False, steps=0) < layers
    assert layers < taken(kl_steps=0) < taken(kl_steps=20) < taken()
    # twice the steps take twice the time, of which three passes are of source and student
    step = (taken(kl_steps=200, mix=False) - taken(kl_steps=100, mix=False)) / 100
    forward = 2048 * forward_operations(plan) / 1e12 / 3600
    assert 3 * forward < step < 4 * forward
    assert taken(kl_steps=0, mix=False, tokens=4096) < 0.8 * layers
    assert estimate_needs(plan, CalibrationOptions()).hours is None


def test_less_memory_leaves_out_what_takes_time(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for memory in (64 << 30, 1 << 20):
        monkeypatch.setenv(STATED, json.dumps({"speed": 1e12, "memory": memory}))
        found.append(estimate_needs(plan_of(CHECKPOINT), options()).hours)
    assert found[1] is not None
    assert found[0] is not None
    assert found[1] < found[0] / 2


def test_a_gpu_is_as_fast_as_a_share_of_its_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = {"gpu_driver": True, "gpu": True, "memory": 64 << 30, "speed": 1.0}
    found = {}
    for name in ("NVIDIA H100 80GB HBM3", "NVIDIA L4", "Tesla K80"):
        monkeypatch.setenv(STATED, json.dumps(machine | {"gpu_name": name}))
        found[name] = estimate_needs(plan_of(CHECKPOINT), options(device=None)).hours
    fast, slow, unknown = found.values()
    assert slow == pytest.approx(fast * GPUS["H100"][0] / GPUS["L4"][0])
    assert unknown is not None
    assert unknown > 1000  # measured, at the stated operation per second


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("Tesla V100-SXM2-32GB", None),
    ],
)
def test_gpus_are_known_by_name(
    device: str, name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STATED, json.dumps({"gpu_name": device}))
    assert known_gpu("cuda:0") == name


def test_a_cpu_is_measured() -> None:
    assert known_gpu("cpu") is None
    assert 1e8 < device_speed("cpu") < 1e14


@pytest.mark.parametrize(
    ("hours", "words"),
    [
        (2.3, "about 2 hours"),
        (1.2, "about 1 hour"),
        (47.0, "about 50 hours"),
        (0.62, "about 40 minutes"),
        (0.001, "about 1 minute"),
    ],
)
def test_time_is_said_by_one_digit(hours: float, words: str) -> None:
    assert about(hours) == words
