"""Which checkpoints are kept, and checkpoints that are written while the run goes on."""

import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gqa_convert.errors import NoSpaceError
from gqa_convert.training.checkpoints import Checkpoints, Progress
from gqa_convert.training.saving import Saver
from gqa_convert.training.uptrain import uptrain_checkpoint
from tests.helpers.uptrain_runs import (
    AtFileEvent,
    die,
    in_child,
    leftovers,
    metrics,
    recipe,
    run,
    student_home,
    weights,
)

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


class Held(Checkpoints):
    """Waits, before it writes, until it is let go."""

    go: threading.Event
    fails = False

    def save(self, *arguments: Any, **record: Any) -> Path:
        assert self.go.wait(20)
        if self.fails:
            raise NoSpaceError("the disk is full")
        return super().save(*arguments, **record)


def test_what_is_saved_is_the_state_at_the_time_of_the_call(tmp_path: Path) -> None:
    held = Held(tmp_path / "checkpoints", 2, main=True)
    held.go = threading.Event()
    done: list[int] = []
    saver = Saver(held, background=True, on_saved=lambda progress: done.append(progress.step))
    weight, progress = torch.arange(4.0), Progress(step=1)
    saver.save({"w": weight}, progress, **RECORD)
    weight.zero_()
    progress.step = 2
    assert (held.steps(), done) == ([], [])
    held.go.set()
    saver.finish()
    assert (held.steps(), done) == ([1], [1])
    read = {"w": torch.zeros(4)}
    held.load(1, read, 1)
    assert torch.equal(read["w"], torch.arange(4.0))


def test_an_error_of_the_writer_is_raised_once_by_the_next_save(tmp_path: Path) -> None:
    held = Held(tmp_path / "checkpoints", 2, main=True)
    held.go, held.fails = threading.Event(), True
    held.go.set()
    saver = Saver(held, background=True)
    saver.save({"w": torch.zeros(2)}, Progress(step=1), **RECORD)
    with pytest.raises(NoSpaceError):
        saver.save({"w": torch.zeros(2)}, Progress(step=2), **RECORD)
    saver.finish()
    assert held.steps() == []


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with student_home(tmp_path_factory.mktemp("saving")) as folder:
        yield folder


@pytest.fixture(scope="module")
def whole(home: Path) -> Path:
    """A run that waits for its disk."""
    run(home, home / "whole")
    return home / "whole"


def test_steps_do_not_wait_for_a_slow_disk(
    home: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer of the checkpoint after step 2 is let go by step 3, for which it would wait for ever otherwise."""
    go, waited, original = threading.Event(), list[bool](), Checkpoints._publish

    def publish(*arguments: Any) -> None:
        waited.append(go.wait(20))
        original(*arguments)

    monkeypatch.setattr(Checkpoints, "_publish", publish)
    seen = dict[int, list[str]]()

    def on_step(report: Any) -> None:
        folder = tmp_path / "run" / "checkpoints"
        seen[report.line.step] = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
        if report.line.step == 3:
            go.set()

    uptrain_checkpoint(recipe(home, tmp_path / "run", async_checkpoints=True), [], on_step=on_step)
    assert waited == [True, True, True]
    assert "step-000002" not in seen[3]
    assert metrics(tmp_path / "run") == metrics(whole)
    assert weights(tmp_path / "run") == weights(whole)
    assert leftovers(tmp_path / "run") == []


def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(home: Path, whole: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"

    def killed() -> None:
        run_of = recipe(home, output, async_checkpoints=True)
        original = Checkpoints._publish

        def publish(self: Any, work: Path, final: Path, record: Any) -> None:
            if final.name == "step-000004":
                AtFileEvent(work, 3, die)
            original(self, work, final, record)

        Checkpoints._publish = publish  # type: ignore[method-assign]  # in the child only
        uptrain_checkpoint(run_of, [])

    assert in_child(killed) == (-signal.SIGKILL, "")
    assert Checkpoints(output / "checkpoints", 2, main=True).steps() == [2]
    assert [path.name for path in (output / "checkpoints").glob(".unfinished-*")] == [".unfinished-step-000004"]
    run(home, output, async_checkpoints=True)
    assert metrics(output) == metrics(whole)
    assert weights(output) == weights(whole)
    assert leftovers(output) == []
    shutil.rmtree(output)
