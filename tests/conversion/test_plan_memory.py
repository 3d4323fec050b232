"""What a plan holds for each of very many tensors, of which most are copied."""

import tracemalloc
from pathlib import Path

import pytest

from benchmarks.synthetic import make_llama
from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.plan import make_plan


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
