"""The estimate of what a conversion needs, and the device that it runs on."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gqa_convert
from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion import hours, resources
from gqa_convert.conversion.estimate import Needs, estimate_needs
from gqa_convert.conversion.layers.last_stage import Student
from gqa_convert.conversion.layers.layer_store import LayerStore
from gqa_convert.conversion.options import CalibrationOptions
from gqa_convert.conversion.plan import Plan, make_plan
from tests.helpers import folding_cases as folded
from tests.helpers.fitting import batches_for, fit, plan_of

MODEL = Path(gqa_convert.__file__).parent / "demo_checkpoint"
GIB = 1 << 30


@pytest.fixture(autouse=True)
def known_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hours, "device_speed", lambda _: 1e12)


def plan_by(method: str) -> Plan:
    return make_plan(open_checkpoint(MODEL), 1, method=method)


def estimate(method: str = "fit", **options: Any) -> Needs:
    source = None if method in ("mean", "factor") else "text.txt"
    return estimate_needs(plan_by(method), CalibrationOptions(source, **options))


def test_each_part_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """More text, the last stage, and merged layers beside the result."""
    monkeypatch.setattr(resources, "available_memory", lambda _: 64 * GIB)
    plan = plan_by("fit")
    once, twice = estimate(tokens=20_480), estimate(tokens=40_960)
    activations = resources._KEPT_BYTES * 20_480 * 192
    assert twice.least_memory_bytes - once.least_memory_bytes == activations
    assert twice.disk_bytes == once.disk_bytes
    assert once.offloaded_bytes == 4 * plan.parameters_before
    sizes = {"tokens": 2048, "sequence_length": 512}
    assert (
        estimate(**sizes, kl_steps=20).memory_bytes
        > 1.1 * estimate(**sizes, kl_steps=0, mix=False).memory_bytes
    )
    assert estimate(**sizes).memory_bytes == estimate(**sizes, kl_steps=20).memory_bytes
    assert "then up to 20 steps on all layers together" in estimate(**sizes, kl_steps=20).work
    monkeypatch.setattr(resources, "available_memory", lambda _: 64 * GIB)
    assert (estimate("mean").tokens, estimate("mean").disk_bytes) == (
        None,
        plan_by("mean").disk_bytes,
    )
    assert estimate("factor").disk_bytes > estimate("mean").disk_bytes


def test_what_is_needed_does_not_depend_on_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """With as much as it says, nothing is left out; with less, what is left out is said."""
    sizes = {"tokens": 2048, "sequence_length": 2048}
    monkeypatch.setattr(resources, "available_memory", lambda _: 64 * GIB)
    best = estimate(**sizes)
    assert best.left_out == ()
    assert best.least_memory_bytes < best.memory_bytes
    plain = estimate(**sizes, kl_steps=0, mix=False)
    for free in (best.memory_bytes, 16 << 20):
        monkeypatch.setattr(resources, "available_memory", lambda _, free=free: free)
        found = estimate(**sizes)
        assert replace(found, left_out=(), hours=None) == replace(best, hours=None)
        assert estimate(**sizes, kl_steps=0, mix=False) == plain
        assert bool(found.left_out) is (free < best.memory_bytes)
    options = CalibrationOptions("text.txt", **sizes)
    whole, least = (
        resources.last_stage_free(plan_by("fit"), options, recompute=again)
        for again in (False, True)
    )
    base = resources._STAGE_BASE / resources._STAGE_SHARE
    assert whole - base > 1.5 * (least - base)
    for free, recomputes, trains in (
        (whole, False, True),
        (whole - 1, True, True),
        (least, True, True),
        (least - 1, True, False),
    ):
        monkeypatch.setattr(resources, "available_memory", lambda _, free=free: free)
        assert resources.decide(plan_by("fit"), options).recompute is recomputes
        told = [sentence for sentence in estimate(**sizes).left_out if "the last stage" in sentence]
        assert not told if trains else "free memory" in told[0]
    monkeypatch.setattr(resources, "_MOST_PARAMETERS", 1000)
    assert any("--kl-steps 200 runs it" in sentence for sentence in estimate(**sizes).left_out)
    assert not any("last stage" in sentence for sentence in estimate(**sizes, kl_steps=3).left_out)


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_memory_for_what_is_trained_is_asked_for(name: str, tmp_path: Path) -> None:
    """What is trained with its gradients and moments, and the weights that fused projections run
    with.
    """
    case = folded.build(name)
    source = case.save(tmp_path / "source")
    plan, batches = plan_of(source), batches_for(case.model)
    with LayerStore(tmp_path / "out", {}, keep=False) as store:
        fit(plan, store, batches, steps=0)
        student = Student(plan, store, case.model, nullcontext)
    trained = 0
    for layer in student.layers:
        named = layer.named().items()
        trained += sum(tensor.nbytes for name, tensor in named if name.endswith("weight"))
    fused = sum(tensor.nbytes for key, tensor in case.model.named_parameters() if "c_attn" in key)
    assert bool(fused) is (name == "gpt2")
    assert (
        resources.last_stage_bytes(plan, 0, "cpu", recompute=False)
        == resources._STAGE_BASE + 4 * trained + fused
    )
