"""The estimate of what a conversion needs, and the device that it runs on."""

from pathlib import Path
from typing import Any

import pytest
import torch

import gqa_convert
from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.fit import memory
from gqa_convert.conversion.fit.distillation import DistillationOptions, Student
from gqa_convert.conversion.fit.layer_store import LayerStore
from gqa_convert.conversion.fit.memory import Needs
from gqa_convert.conversion.fit.optimizer import RelativeAdam
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
    """More text, the last stage, and merged layers beside the result; activations that do not fit lie on the disk."""
    monkeypatch.setattr(memory, "available_memory", lambda _: 64 * GIB)
    once, twice = estimate(tokens=20_480), estimate(tokens=40_960)
    activations = memory.KEPT_BYTES * 20_480 * 192
    assert twice.memory_bytes - once.memory_bytes == activations
    assert twice.disk_bytes == once.disk_bytes
    sizes = {"tokens": 2048, "sequence_length": 512}
    assert estimate(**sizes, kl_steps=20).memory_bytes > 1.1 * estimate(**sizes, kl_steps=0).memory_bytes
    assert estimate(**sizes).memory_bytes == estimate(**sizes, kl_steps=20).memory_bytes
    weights = 4 * plan_by("fit").parameters_before
    needed = memory.plan_last_stage(plan_by("fit"), 2048, 0, "cpu", 0).nbytes / memory._STAGE_SHARE
    for free, trains in ((needed + weights + 2, True), (needed + weights - 2, False)):
        monkeypatch.setattr(memory, "available_memory", lambda _, free=free: free)
        long = {"tokens": 2048, "sequence_length": 2048, "kl_rank": 0}
        assert (estimate(**long).memory_bytes > estimate(**long, kl_steps=0).memory_bytes) is trains
    monkeypatch.setattr(memory, "available_memory", lambda _: 64 * GIB)
    assert (estimate("mean").tokens, estimate("mean").disk_bytes) == (None, plan_by("mean").disk_bytes)
    assert estimate("factor").disk_bytes > estimate("mean").disk_bytes
    monkeypatch.setattr(memory, "available_memory", lambda _: 1 << 20)
    assert estimate(tokens=20_480).disk_bytes == once.disk_bytes + activations


def test_the_last_stage_takes_what_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps activations before it computes them again, and trains projections whole before it changes them by low
    ranks; a rank that is asked for counts more than memory.
    """
    plan = plan_by("fit")
    monkeypatch.setattr(memory, "LOW_RANK", 2)

    def found(free: float, rank: int | None = None, device: str = "cpu") -> tuple[int, bool, bool]:
        stage = memory.plan_last_stage(plan, 512, free, device, rank)
        return stage.rank, stage.recomputes, stage.affordable

    needed = [
        memory.plan_last_stage(plan, 512, free, "cpu", rank).nbytes / memory._STAGE_SHARE
        for free, rank in ((1e15, 0), (0, 0), (0, 2))
    ]
    assert needed == sorted(needed, reverse=True)
    expected = [(0, False, True), (0, True, True), (2, True, True)]
    assert [found(free + 2) for free in needed] == expected
    assert found(needed[-1] - 2) == (2, True, False)
    assert found(needed[-1] - 2, 0) == (0, True, False)
    assert found(1e15, 5) == (5, False, True)
    monkeypatch.setattr(memory, "_MOST_PARAMETERS", 1000)
    assert found(1e15) == (0, False, False)
    assert found(1e15, device="cuda") == (0, False, True)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_memory_for_what_is_trained_is_asked_for(name: str, rank: int, tmp_path: Path) -> None:
    """What is trained with its gradients and moments, what that began with, and the weights that modules run with."""
    case = folded.build(name)
    source = case.save(tmp_path / "source")
    plan, batches = plan_of(source), batches_for(case.model)
    with LayerStore(tmp_path / "out", {}, keep=False) as store:
        fit(plan, store, batches, steps=0)
        options = DistillationOptions(steps=1, seed=0, rank=rank)
        student = Student(plan, store, case.model, options)
        optimizer = RelativeAdam(student.start, 1e-3, 1, rank)
    begun = trained = 0
    for parts, weights in zip(student.start, optimizer._layers, strict=True):
        for role in ("queries", "keys", "values", "outputs"):
            begun += parts[role].nbytes
            weight = weights[role]
            leaves = [weight] if isinstance(weight, torch.Tensor) else [weight.down, weight.up]
            trained += sum(leaf.nbytes for leaf in leaves)
    width = 4 * memory.hidden_size_of(plan)
    sizes = [(layer.key_head_dim + layer.value_head_dim, layer) for layer, _ in plan.merged_layers]
    projected = width * sum(size * layer.heads for size, layer in sizes)
    repeated = width * sum(size * layer.kv_heads for size, layer in sizes)
    changed = projected if rank else 0  # the sum of a projection and its change
    assert memory.trained_bytes(plan, rank) == begun + 4 * trained + projected + repeated + changed
