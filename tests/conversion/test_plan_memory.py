"""What a plan holds for each of very many tensors, of which most are copied."""

import tracemalloc
from pathlib import Path

import pytest

from benchmarks.synthetic import make_llama
from gqa_convert.checkpoint.headers import JoinedTensors
from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.plan import OutputTensor, Piece, make_plan
from gqa_convert.conversion.plan.model import MostlyCopied


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


def test_the_tensors_are_those_of_the_source(experts: Path) -> None:
    checkpoint = open_checkpoint(experts)
    plan = make_plan(checkpoint, 4)
    changed = {change.name for change in plan.changes}
    expected = [(number, name, entry) for number, name, entry in checkpoint.tensors()]
    found = [(number, tensor) for number, shard in enumerate(plan.shards) for tensor in shard.tensors]
    assert [(number, tensor.name) for number, tensor in found] == [(number, name) for number, name, _ in expected]
    for (number, tensor), (_, name, entry) in zip(found, expected, strict=True):
        if name not in changed:
            copy = OutputTensor(name, entry.dtype, entry.shape, (Piece(((number, entry.start),), entry.nbytes),))
            assert tensor == copy
    for shard in plan.shards:
        assert shard.nbytes == sum(tensor.nbytes for tensor in shard.tensors)
        assert shard.totals.elements == sum(tensor.elements for tensor in shard.tensors)


def test_a_sequence_of_copies_and_others(experts: Path) -> None:
    entries = open_checkpoint(experts).shards[0].header.tensors
    first, second, *rest = entries
    other = OutputTensor(second, "F32", (1,), ())
    tensors = MostlyCopied(0, entries, {first: None, second: other, "of another file": other})
    assert [tensor.name for tensor in tensors] == [second, *rest]
    assert len(tensors) == len(entries) - 1
    assert tensors[0] is other
    assert tensors[-1].name == rest[-1]
    assert tensors[1:3] == tuple(tensors)[1:3]
    assert tensors == tuple(tensors)
    assert tensors != tuple(tensors)[1:]


def test_headers_joined(experts: Path) -> None:
    checkpoint = open_checkpoint(experts)
    joined = JoinedTensors(shard.header.tensors for shard in checkpoint.shards)
    assert dict(joined) == {name: entry for _, name, entry in checkpoint.tensors()}
    assert len(joined) == len(list(joined))
    assert "nothing" not in joined
    assert joined.get("nothing") is None
