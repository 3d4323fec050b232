"""What a plan holds for each of very many tensors, of which most are copied."""

import tracemalloc
from pathlib import Path

import pytest

from benchmarks.synthetic import make_llama
from gqa_convert.checkpoint.headers import JoinedTensors
from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.plan import OutputTensor, make_plan


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The headers of a Mixtral of 4,900 tensors in 3 files."""
    folder = tmp_path_factory.mktemp("plan") / "mixtral"
    make_llama(folder, layers=4, hidden=256, intermediate=64, heads=8, experts=400, shard_bytes=90_000_000, sparse=True)
    return folder


def test_a_tensor_takes_little_memory(experts: Path) -> None:
    checkpoint = open_checkpoint(experts)
    count = sum(1 for _ in checkpoint.tensors())
    assert count > 4800
    assert make_plan(checkpoint, 4).disk_bytes  # with imports
    tracemalloc.start()
    try:
        plan = make_plan(checkpoint, 4)
        assert plan.disk_bytes
        planned, at_most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert planned < 20 * count
    assert at_most < 40 * count


def test_a_tensors_header_takes_little_memory(experts: Path) -> None:
    assert open_checkpoint(experts)  # with imports
    tracemalloc.start()
    try:
        checkpoint = open_checkpoint(experts)
        held, at_most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    count = sum(1 for _ in checkpoint.tensors())
    assert held < 290 * count
    assert at_most < 570 * count


@pytest.mark.parametrize("limit", [None, 20_000_000])
def test_the_tensors_are_those_of_the_source(experts: Path, limit: int | None) -> None:
    checkpoint = open_checkpoint(experts)
    plan = make_plan(checkpoint, 4, max_shard_size=limit)
    changed = {change.name for change in plan.changes}
    expected = list(checkpoint.tensors())
    found = list(plan.all_tensors())
    assert [tensor.name for tensor in found] == [name for _, name, _ in expected]
    for tensor, (_, name, entry) in zip(found, expected, strict=True):
        if name not in changed:
            assert tensor == OutputTensor(name, entry.dtype, entry.shape)
            assert (tensor.nbytes, tensor.elements) == (entry.nbytes, entry.elements)
    if limit is not None:
        assert len(plan.files) > len(checkpoint.shards)
        for file in plan.files:
            assert sum(tensor.nbytes for tensor in plan.tensors(file)) <= limit


def test_headers_joined(experts: Path) -> None:
    checkpoint = open_checkpoint(experts)
    joined = JoinedTensors(shard.header.tensors for shard in checkpoint.shards)
    assert dict(joined) == {name: entry for _, name, entry in checkpoint.tensors()}
    assert len(joined) == len(list(joined))
    assert "nothing" not in joined
    assert joined.get("nothing") is None
