"""Shards within a machine and copies between machines: the mesh, and runs of two machines with two
processes each.
"""

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from gqa_convert import sharding
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.demo import CHECKPOINT
from gqa_convert.errors import LaunchError
from tests.helpers.ranks import Job, uptrain


@pytest.mark.parametrize(
    ("processes", "of_machine", "shards"), [(16, 8, 8), (4, 8, 4), (8, 1, 1), (1, 8, 1)]
)
def test_a_machine_holds_all_parameters(
    processes: int, of_machine: int, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sharding.number_of_shards("hybrid", processes, of_machine) == shards
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(of_machine))
    assert sharding.number_of_shards("hybrid", processes) == shards


def test_machines_with_unequally_many_processes_are_refused() -> None:
    with pytest.raises(LaunchError, match="of 12 processes 8 are on this machine: start as many"):
        sharding.number_of_shards("hybrid", 12, 8)


@pytest.fixture
def four_processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stands for a group of four, of which this process is the last one."""
    torch.distributed.init_process_group("fake", rank=3, world_size=4, store=FakeStore())
    monkeypatch.setattr(sharding, "started", lambda: 4)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("four_processes")
def test_neighbours_hold_the_shards_of_a_copy() -> None:
    assert sharding.device_mesh("cpu", 2).mesh.tolist() == [[0, 1], [2, 3]]
    assert sharding.device_mesh("cpu", 4).mesh.tolist() == [0, 1, 2, 3]


STEPS = 6


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe of six steps with five samples each, with a teacher."""
    folder = tmp_path_factory.mktemp("hybrid")
    convert_checkpoint(CHECKPOINT, folder / "model", 3)
    words = random.Random(0).choices([f"word{number}" for number in range(500)], k=20_000)
    (folder / "text.txt").write_text(" ".join(words))
    keys = {
        "model": str(folder / "model"),
        "teacher": str(CHECKPOINT),
        "distillation_weight": 0.5,
        "data": str(folder / "text.txt"),
        "evaluation_data": str(folder / "text.txt"),
        "evaluation_tokens": 256,
        "tokens": STEPS * 160,
        "tokens_per_step": 160,
        "sequence_length": 32,
        "learning_rate": 1e-3,
        "precision": "no",
        "save_every": 2,
        "keep_checkpoints": STEPS,
        "output": "o",
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(keys))
    return path


def start(recipe: Path, output: Path, *overrides: str, processes: int = 1) -> Job:
    """A run on machines of two processes each."""
    environment = {"XDG_CACHE_HOME": str(recipe.parent / "cache"), "LOCAL_WORLD_SIZE": "2"}
    arguments = (str(recipe), f"output={output}", *overrides)
    logs = output.parent / f"{output.name}-logs"
    return Job(uptrain, arguments, logs, processes, **environment)


def numbers(output: Path) -> list[Any]:
    """Losses and norms of all steps, and the last loss on held-out text."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    found = [line[name] for line in lines for name in ("loss", "kl", "gradient_norm")]
    return [*found, lines[-1]["evaluation_loss"]]


@pytest.mark.slow
@pytest.mark.parametrize("key", ["optimizer=adamw", "optimizer=adafactor", "lora={rank: 3}"])
def test_two_machines_of_two_processes_train_as_one_process(
    recipe: Path, tmp_path: Path, key: str
) -> None:
    """Also if all four are killed in the middle, and two go on."""
    alone = start(recipe, tmp_path / "alone", key)
    assert alone.wait(120) == [0], alone.text()
    expected = numbers(tmp_path / "alone")
    keys = (key, "sharding=hybrid")
    output = tmp_path / "hybrid"
    four = start(recipe, output, *keys, processes=4)
    four.wait_for(output / "checkpoints" / "step-000004")
    four.kill()
    four.wait()
    other = tmp_path / "other"
    shutil.copytree(output, other)
    four = start(recipe, output, *keys, processes=4)
    assert four.wait(120) == [0] * 4, four.text()
    assert "resuming from" in four.text()
    assert numbers(output) == pytest.approx(expected, rel=1e-4)
    two = start(recipe, other, *keys, processes=2)
    assert two.wait(120) == [0, 0], two.text()
    assert "resuming from" in two.text()
    assert numbers(other) == pytest.approx(expected, rel=1e-4)
