"""Which checkpoints are kept, and which one a run resumes from."""

from pathlib import Path

import pytest
import torch

from gqa_convert.errors import ResumeError
from gqa_convert.training.checkpoints import Checkpoints, Progress


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", 2, main=True)


def save(checkpoints: Checkpoints, *steps: int, number: float = 0.0) -> None:
    for step in steps:
        checkpoints.save({"w": torch.full((2,), number)}, Progress(step=step))
        assert checkpoints.path(step).exists()


def test_the_newest_ones_are_kept_and_hold_what_was_saved(checkpoints: Checkpoints) -> None:
    save(checkpoints, 1, 2)
    save(checkpoints, 5, number=2.0)
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["step-000002", "step-000005"]
    newest, read = checkpoints.newest(), {"w": torch.zeros(2)}
    assert newest is not None
    assert newest.step == 5
    checkpoints.load(5, read)
    assert torch.equal(read["w"], torch.full((2,), 2.0))


@pytest.mark.parametrize("damage", ["no tensors", "no record", "half a record"])
def test_a_damaged_checkpoint_is_named(checkpoints: Checkpoints, damage: str) -> None:
    save(checkpoints, 4, 5)
    if damage == "no tensors":
        next(checkpoints.path(5).glob("*.distcp")).unlink()
    elif damage == "no record":
        (checkpoints.path(5) / "run.json").unlink()
    else:
        (checkpoints.path(5) / "run.json").write_text('{"step"')

    def resume() -> None:
        checkpoints.newest()
        checkpoints.load(5, {"w": torch.zeros(2)})

    with pytest.raises(ResumeError, match=r"step-000005 cannot be loaded .*: remove it to resume from the checkpoint"):
        resume()
