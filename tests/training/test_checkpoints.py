"""Which checkpoints are kept, and which one a run resumes from."""

from pathlib import Path
from typing import Any

import torch

from gqa_convert.training.checkpoints import Checkpoints, Progress

RECORD: dict[str, Any] = {"recipe": {}, "processes": 1, "samples": "s"}


def test_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2, main=True)
    for step in (1, 2, 3, 5):
        checkpoints.save({"w": torch.zeros(2)}, Progress(step=step), **RECORD)
        assert step in checkpoints.steps()
    assert checkpoints.steps() == [3, 5]
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.progress.step == 5


def test_a_damaged_checkpoint_replaces_none_that_is_whole(tmp_path: Path) -> None:
    """It counts as none of those that are kept, and is written anew when the run comes to its step."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1, main=True)
    checkpoints.save({"w": torch.zeros(2)}, Progress(step=4), **RECORD)
    (checkpoints.path(4) / "run.json").write_text("{}")
    checkpoints.save({"w": torch.ones(2)}, Progress(step=3), **RECORD)
    said: list[str] = []
    newest = checkpoints.newest(said.append)
    assert newest is not None
    assert (newest.progress.step, len(said), checkpoints.steps()) == (3, 1, [3, 4])
    checkpoints.save({"w": torch.full((2,), 2.0)}, Progress(step=4), **RECORD)
    read = {"w": torch.zeros(2)}
    checkpoints.load(4, read, 1)
    assert torch.equal(read["w"], torch.full((2,), 2.0))
    assert checkpoints.steps() == [4]
