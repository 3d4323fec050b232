"""Uptraining on disks that are full or can't be written, and behind terminals that go away."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gqa_convert.errors import NoSpaceError, OutputError
from gqa_convert.training.metrics import StepMetrics
from gqa_convert.training.uptrain import uptrain_checkpoint
from tests.helpers.uptrain_runs import leftovers, metrics, recipe, run, student_home, weights


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with student_home(tmp_path_factory.mktemp("home")) as folder:
        yield folder


@pytest.fixture(scope="module")
def whole(home: Path) -> Path:
    run(home, home / "whole")
    return home / "whole"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root may mount file systems")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def remount(disk: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(disk)], check=True)


CHECKPOINT = 27
"""MB of a checkpoint, and a little more than its."""


@pytest.mark.parametrize(
    ("size", "saved"),
    [(1, []), (CHECKPOINT // 2, []), (CHECKPOINT * 3 // 2, [2]), (CHECKPOINT * 5 // 2, [2, 4])],
)
def test_a_full_disk_leaves_what_is_there(home: Path, whole: Path, disk: Path, size: int, saved: list[int]) -> None:
    remount(disk, f"size={size}m")
    output = disk / "run"
    with pytest.raises(NoSpaceError, match="is full: make room and run the same command again"):
        run(home, output)
    assert [int(path.name[-6:]) for path in sorted((output / "checkpoints").glob("*"))] == saved
    assert leftovers(output) == []
    remount(disk, "size=200m")
    run(home, output)
    assert metrics(output) == metrics(whole)
    assert weights(output) == weights(whole)


def test_a_disk_that_fills_up_at_the_end(home: Path, whole: Path, disk: Path) -> None:
    """The last checkpoint is there, the model has no room."""
    remount(disk, "size=200m")
    output = disk / "run"
    keys = {"keep_checkpoints": 1, "save_every": 100}
    filler = disk / "filler"

    def fill(metrics: StepMetrics, _: int) -> None:
        if metrics.step == 6:
            filler.write_bytes(bytes((200 - CHECKPOINT - 3) << 20))

    with pytest.raises(NoSpaceError):
        uptrain_checkpoint(recipe(home, output, **keys), [], on_step=fill)
    assert [path.name for path in (output / "checkpoints").iterdir()] == ["step-000006"]
    assert not (output / "model").exists()
    assert leftovers(output) == []
    filler.unlink()
    run(home, output, **keys)
    assert weights(output) == weights(whole)


def test_an_output_that_cannot_be_written(home: Path, disk: Path) -> None:
    path = recipe(home, disk / "run")
    remount(disk, "ro")
    with pytest.raises(OutputError, match=r"can't be used .*Read-only file system"):
        uptrain_checkpoint(path, [])
