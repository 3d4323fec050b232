"""Which checkpoints are kept, and which one a run resumes from."""

from pathlib import Path

import torch

from gqa_convert.training.checkpoints import Checkpoints, Progress, RunRecord


def save(checkpoints: Checkpoints, step: int, number: float = 0.0) -> None:
    record = RunRecord(progress=Progress(step=step), recipe={}, processes=1, samples="s")
    checkpoints.save({"w": torch.full((2,), number)}, record)


def steps(checkpoints: Checkpoints) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in checkpoints.folder.iterdir())


def test_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2, main=True)
    for step in (1, 2, 3, 5):
        save(checkpoints, step)
        assert step in steps(checkpoints)
    assert steps(checkpoints) == [3, 5]
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.progress.step == 5


def test_a_damaged_checkpoint_replaces_none_that_is_whole(tmp_path: Path) -> None:
    """It counts as none of those that are kept, and is written anew when the run comes to its step."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1, main=True)
    save(checkpoints, 4)
    (checkpoints.path(4) / "run.json").write_text("{}")
    save(checkpoints, 3)
    said: list[str] = []
    newest = checkpoints.newest(said.append)
    assert newest is not None
    assert (newest.progress.step, len(said), steps(checkpoints)) == (3, 1, [3, 4])
    save(checkpoints, 4, 2.0)
    read = {"w": torch.zeros(2)}
    checkpoints.load(4, read, 1)
    assert torch.equal(read["w"], torch.full((2,), 2.0))
    assert steps(checkpoints) == [4]


def test_damaged_checkpoints_do_not_count_among_the_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2, main=True)
    for step in (1, 2):
        save(checkpoints, step)
    next(checkpoints.path(2).glob("*.distcp")).unlink()
    save(checkpoints, 3)
    assert [path.name for path in checkpoints.whole()] == ["step-000003", "step-000001"]
