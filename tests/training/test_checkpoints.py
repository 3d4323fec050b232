"""Which checkpoints are kept, and which one a run resumes from."""

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

from gqa_convert.training.checkpoints import Checkpoints, Progress, state_of


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", 2)


def save(checkpoints: Checkpoints, *steps: int, number: float = 0.0) -> None:
    for step in steps:
        checkpoints.save({"w": torch.full((2,), number)}, Progress(step=step))
        assert checkpoints.path(step).exists()


def test_the_newest_whole_ones_are_kept(checkpoints: Checkpoints) -> None:
    save(checkpoints, 1, 2, 3)
    next(checkpoints.path(3).glob("*.distcp")).unlink()
    save(checkpoints, 5)
    assert [record.step for record in checkpoints.whole()] == [5, 2]
    save(checkpoints, 6)
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == [
        "step-000005",
        "step-000006",
    ]


def test_a_damaged_checkpoint_is_passed_over_and_written_anew(checkpoints: Checkpoints) -> None:
    save(checkpoints, 4)
    (checkpoints.path(4) / "run.json").write_text("{}")
    save(checkpoints, 3)
    said: list[str] = []
    newest = checkpoints.newest(said.append)
    assert newest is not None
    assert (newest.step, len(said)) == (3, 1)
    save(checkpoints, 4, number=2.0)
    read = {"w": torch.zeros(2)}
    checkpoints.load(4, read)
    assert torch.equal(read["w"], torch.full((2,), 2.0))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_an_optimizer_that_counts_no_steps_has_a_state(momentum: float) -> None:
    """That of torch's SGD before its first step; a step with it is that without."""
    found = []
    for saves in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        if saves:
            state = state_of(model, optimizer)
            assert state["model"].keys() == {"weight", "bias"}
            set_optimizer_state_dict(model, optimizer, state["optimizer"])
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        found.append(model.weight.detach())
    assert torch.equal(*found)
