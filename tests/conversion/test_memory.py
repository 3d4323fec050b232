"""The estimate of what a conversion needs, and the device that it runs on."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import gqa_convert
from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.fit import memory
from gqa_convert.conversion.fit.distillation import Student
from gqa_convert.conversion.fit.layer_store import LayerStore
from gqa_convert.conversion.fit.memory import Needs
from gqa_convert.conversion.fit.options import CalibrationOptions
from gqa_convert.conversion.plan import Plan, make_plan
from tests.helpers import folding_cases as folded
from tests.helpers.fitting import batches_for, fit, plan_of

MODEL = Path(gqa_convert.__file__).parent / "demo_checkpoint"
GIB = 1 << 30


def plan_by(method: str) -> Plan:
    return make_plan(open_checkpoint(MODEL), 1, method=method)


def estimate(method: str = "fit", **options: Any) -> Needs:
    source = None if method in ("mean", "factor") else "text.txt"
    return memory.estimate_needs(plan_by(method), CalibrationOptions(source, **options))


def test_each_part_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """More text, the last stage, and merged layers beside the result."""
    monkeypatch.setattr(memory, "available_memory", lambda _: 64 * GIB)
    once, twice = estimate(tokens=20_480), estimate(tokens=40_960)
    activations = memory._KEPT_BYTES * 20_480 * 192
    assert twice.memory_bytes - once.memory_bytes == activations
    assert twice.disk_bytes == once.disk_bytes
    sizes = {"tokens": 2048, "sequence_length": 512}
    assert estimate(**sizes, kl_steps=20).memory_bytes > 1.1 * estimate(**sizes, kl_steps=0).memory_bytes
    assert estimate(**sizes).memory_bytes == estimate(**sizes, kl_steps=20).memory_bytes
    weights = 4 * plan_by("fit").parameters_before
    needed = memory.last_stage_bytes(plan_by("fit"), 2048) / memory._STAGE_SHARE
    for free, trains in ((needed + weights + 2, True), (needed + weights - 2, False)):
        monkeypatch.setattr(memory, "available_memory", lambda _, free=free: free)
        long = {"tokens": 2048, "sequence_length": 2048}
        assert (estimate(**long).memory_bytes > estimate(**long, kl_steps=0).memory_bytes) is trains
    monkeypatch.setattr(memory, "available_memory", lambda _: 64 * GIB)
    assert (estimate("mean").tokens, estimate("mean").disk_bytes) == (None, plan_by("mean").disk_bytes)
    assert estimate("factor").disk_bytes > estimate("mean").disk_bytes


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_memory_for_what_is_trained_is_asked_for(name: str, tmp_path: Path) -> None:
    """What is trained with its gradients and moments, what that began with, and the weights that modules run with."""
    case = folded.build(name)
    source = case.save(tmp_path / "source")
    plan, batches = plan_of(source), batches_for(case.model)
    with LayerStore(tmp_path / "out", {}, keep=False) as store:
        fit(plan, store, batches, steps=0)
        student = Student(plan, store, case.model, nullcontext)
    trained = installed = 0
    for weights in student.start:
        trained += sum(tensor.nbytes for name, tensor in weights.items() if name.endswith("weight"))
    for layer in plan.layers:
        rows = (layer.key_head_dim + layer.value_head_dim) * (layer.heads + layer.kv_heads)
        installed += 4 * memory.hidden_size_of(plan) * rows
    assert memory.last_stage_bytes(plan, 0) == 5 * trained + installed
