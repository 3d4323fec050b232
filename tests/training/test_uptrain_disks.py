"""Uptraining on disks that are full or can't be written, and behind terminals that go away."""

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gqa_convert.errors import NoSpaceError, OutputError
from gqa_convert.training.metrics import StepMetrics
from tests.helpers.command_line import run as run_command
from tests.helpers.uptrain_runs import in_child, leftovers, metrics, recipe, run, student_home, wait_for, weights


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
    [(1, []), (CHECKPOINT // 2, []), (CHECKPOINT * 3 // 2, [2]), (CHECKPOINT * 5 // 2, [2, 4]), (57, [2, 4])],
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

    from gqa_convert.training.uptrain import uptrain_checkpoint

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
    from gqa_convert.training.uptrain import uptrain_checkpoint

    with pytest.raises(OutputError, match=r"can't be used .*Read-only file system"):
        uptrain_checkpoint(path, [])


def command(path: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "gqa_convert", "uptrain", str(path), *options]


def test_the_command_line(home: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    first = run_command("uptrain", recipe(home, output), "--json")
    assert first.returncode == 0, first.stderr
    assert json.loads(first.stdout) == json.loads((output / "summary.json").read_text())
    assert "6 steps of 64 tokens on 1 process(es), from step 1" in first.stderr
    assert "arning" not in first.stderr
    again = run_command("uptrain", recipe(home, output), "-q")
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    shown = run_command("uptrain", recipe(home, output))
    assert shown.returncode == 0, shown.stderr
    assert "done  384 tokens in 6 steps" in shown.stdout
    assert f"{output} is already complete" in shown.stderr
    wrong = run_command("uptrain", recipe(home, output), "seed=1")
    assert (wrong.returncode, wrong.stdout, wrong.stderr.count("\n")) == (2, "", 1)
    assert "seed was 0 and is now 1" in wrong.stderr


@pytest.mark.slow
def test_a_terminal_that_is_closed(home: Path, tmp_path: Path) -> None:
    """It sends SIGHUP, and from then on nothing can be printed."""
    output = tmp_path / "run"
    path = recipe(home, output, tokens=64 * 400, save_every=1000)
    master, slave = pty.openpty()
    process = subprocess.Popen(command(path), stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
    os.close(slave)
    wait_for(lambda: (output / "metrics.jsonl").is_file() and (output / "metrics.jsonl").stat().st_size > 0)
    os.close(master)
    process.send_signal(signal.SIGHUP)
    process.wait(60)
    (saved,) = (output / "checkpoints").iterdir()
    assert saved.name == f"step-{len(metrics(output)):06d}"
    assert leftovers(output) == []


def test_nobody_reads_the_messages(home: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"

    def broken() -> None:
        from gqa_convert.cli.console.progress import ProgressScreen
        from gqa_convert.cli.console.training import TrainingScreen
        from gqa_convert.training.uptrain import uptrain_checkpoint

        read, write = os.pipe()
        os.close(read)
        os.dup2(write, 2)
        sys.stderr = os.fdopen(2, "w", buffering=1)
        with ProgressScreen(quiet=False) as progress:
            screen = TrainingScreen(progress)
            uptrain_checkpoint(
                recipe(home, output), [], on_message=screen.say, on_step=screen.step, on_tokenize=screen.show
            )

    assert in_child(broken) == (0, "")
    assert (output / "summary.json").is_file()
