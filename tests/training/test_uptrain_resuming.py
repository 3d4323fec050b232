"""Runs that are killed, stopped, changed or finished, on disks that are full, and the same command
again.
"""

import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gqa_convert.errors import (
    DataError,
    DivergedError,
    NoSpaceError,
    OutputError,
    ResumeError,
    StoppedError,
)
from gqa_convert.processes import taking_part
from gqa_convert.training import run as running
from gqa_convert.training.metrics import StepMetrics, log_step
from gqa_convert.training.stopping import StopRequests
from gqa_convert.training.uptrain import uptrain_checkpoint
from tests.helpers.uptrain_runs import (
    STEPS,
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


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with student_home(tmp_path_factory.mktemp("home")) as folder:
        yield folder


@pytest.fixture(scope="module")
def whole(home: Path) -> Path:
    """A run without any interruption."""
    run(home, home / "whole")
    return home / "whole"


def assert_same(output: Path, whole: Path) -> None:
    assert metrics(output) == metrics(whole)
    assert weights(output) == weights(whole)
    assert leftovers(output) == []
    assert sorted(path.name for path in (output / "checkpoints").iterdir()) == [
        "step-000004",
        "step-000006",
    ]
    summary = json.loads((output / "summary.json").read_text())
    assert (summary["steps"], summary["tokens"]) == (STEPS, STEPS * 64)


def events(home: Path, output: Path) -> int:
    """How often a run touches its files."""
    count = home / "count"

    def counted() -> None:
        watch = AtFileEvent(output, 0, die)
        run(home, output)
        count.write_text(str(watch.seen))

    assert in_child(counted) == (0, "")
    return int(count.read_text())


POINTS = int(os.environ.get("GQA_KILL_POINTS", "7"))
"""How many moments a run is killed at; a number above that of its file events means each of them.
"""


@pytest.mark.slow
def test_killed_at_any_file_event_and_run_again(home: Path, whole: Path, tmp_path: Path) -> None:
    total = events(home, tmp_path / "counted")
    assert total > 60
    stride = max(1, total // POINTS)
    for number in range(stride // 2 + 1, total + 1, stride):
        output = tmp_path / f"killed-{number}"

        def killed(output: Path = output, number: int = number) -> None:
            AtFileEvent(output, number, die)
            run(home, output)

        assert in_child(killed) == (-signal.SIGKILL, "")
        if (output / "model").exists():
            assert weights(output) == weights(whole)
        assert in_child(lambda output=output: run(home, output)) == (0, "")
        assert_same(output, whole)
        shutil.rmtree(output)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_at_the_end_of_the_step(
    home: Path, whole: Path, tmp_path: Path, number: signal.Signals
) -> None:
    output = tmp_path / "run"

    def signalled() -> None:
        def log(*arguments: Any) -> None:
            log_step(*arguments)
            if arguments[-1].step == 1:
                os.kill(os.getpid(), number)

        running.log_step = log  # in the child only
        run(home, output, save_every=100)

    code, message = in_child(signalled)
    assert (code, number.name in message) == (75, True)
    assert "run the same command again" in message
    assert leftovers(output) == []
    run(home, output)
    assert metrics(output) == metrics(whole)
    assert weights(output) == weights(whole)


def test_signals_before_and_between_the_steps(
    home: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def during(owner: Any, name: str, *, again: bool = False) -> Any:
        original = getattr(owner, name)

        def interrupted(*arguments: Any) -> Any:
            os.kill(os.getpid(), signal.SIGINT)
            if again:
                os.kill(os.getpid(), signal.SIGINT)
            return original(*arguments)

        return interrupted

    output = tmp_path / "run"
    for name in ("open_inputs", "export"):
        with monkeypatch.context() as patch:
            patch.setattr(running, name, during(running, name))
            with pytest.raises(StoppedError, match="SIGINT between two stages"):
                run(home, output)
        assert not (output / "model").exists()
    with monkeypatch.context() as patch:
        patch.setattr(running, "log_step", during(running, "log_step", again=True))
        code, message = in_child(lambda: run(home, tmp_path / "twice"))
        assert (code, "second Ctrl-C" in message) == (130, True)
    run(home, output)
    assert_same(output, whole)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_a_larger_budget_trains_on(home: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    keys = {"schedule": "constant", "warmup_steps": 0}
    run(home, output, **keys, tokens=192)
    run(home, output, **keys)
    run(home, tmp_path / "at once", **keys)
    assert weights(output) == weights(tmp_path / "at once")
    summary = json.loads((output / "summary.json").read_text())
    assert summary["changes"] == ["from step 4: tokens was 192 and is now 384"]
    assert (
        json.loads((output / "model" / "gqa_conversion.json").read_text())["uptraining_tokens"]
        == 384
    )
    with pytest.raises(ResumeError, match="the budget was 384 tokens and is now 192"):
        run(home, output, **keys, tokens=192)
    shutil.rmtree(output / "checkpoints")
    assert run(home, output, **keys)["tokens"] == 384
    with pytest.raises(ResumeError, match="holds a complete run without checkpoints"):
        run(home, output, **keys, tokens=512)


def stopped_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Let a signal stop the next runs after a step."""

    def log(*arguments: Any) -> None:
        log_step(*arguments)
        if arguments[-1].step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(running, "log_step", log)


def test_a_larger_budget_warms_up_no_longer(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "run"
    keys = {"schedule": "constant", "learning_rate": 1e-4}
    for step, steps in ((1, 100), (2, 150), (3, 300)):  # warm-ups of 2, 3 and 6 steps
        with monkeypatch.context() as patch:
            stopped_at(patch, step)
            with pytest.raises(StoppedError):
                run(home, output, **keys, tokens=64 * steps)
    assert [line["learning_rate"] for line in metrics(output)] == [5e-5, 1e-4, 1e-4]


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_a_larger_budget_does_not_raise_the_learning_rate(
    home: Path, tmp_path: Path, schedule: str
) -> None:
    """It stays where it had fallen to until the longer schedule falls below; with 0 nothing would
    be learned.
    """
    output = tmp_path / "run"
    keys = {
        "schedule": schedule,
        "warmup_steps": 0,
        "tokens_per_step": 64,
        "decay_share": 0.5,
        "learning_rate": 1e-3,
    }
    run(home, output, **keys, tokens=64 * 4)
    run(home, output, **keys, tokens=64 * 6)
    run(home, output, **keys, tokens=64 * 8)
    rates = [line["learning_rate"] for line in metrics(output)]
    assert all(after <= before for before, after in itertools.pairwise(rates))
    assert rates[3:] == pytest.approx([1e-4] * 5)
    run(home, tmp_path / "zero", **keys, tokens=64 * 2, final_learning_rate=0)
    with pytest.raises(
        ResumeError, match="has fallen to 0, so that more tokens would change nothing"
    ):
        run(home, tmp_path / "zero", **keys, tokens=64 * 4, final_learning_rate=0)


def test_an_unfinished_run_with_a_larger_budget_goes_on_falling(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rate that the shorter schedule had reached is its ceiling, also after another
    interruption.
    """
    output = tmp_path / "run"
    keys = {"schedule": "cosine", "warmup_steps": 0, "learning_rate": 1e-3}
    for step in (3, 5):
        with monkeypatch.context() as patch:
            stopped_at(patch, step)
            with pytest.raises(StoppedError):
                run(home, output, **keys, tokens=64 * (4 if step == 3 else 8))
    run(home, output, **keys, tokens=64 * 8)
    expected = [1 - 0.9 * (1 - math.cos(math.pi * step / 4)) / 2 for step in (1, 2, 3)]
    expected += [
        min(expected[2], 1 - 0.9 * (1 - math.cos(math.pi * step / 8)) / 2)
        for step in (4, 5, 6, 7, 8)
    ]
    assert [line["learning_rate"] for line in metrics(output)] == pytest.approx(
        [1e-3 * share for share in expected]
    )


def test_changed_recipes_and_texts_are_refused(home: Path, whole: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    shutil.copytree(whole, output)
    with pytest.raises(
        ResumeError, match=r"seed was 0 and is now 1; z_loss was 0.0 and is now 0.1; restore"
    ):
        run(home, output, z_loss=0.1, seed=1)
    text = tmp_path / "text.txt"
    text.write_text((home / "text.txt").read_text())
    run(home, tmp_path / "own", data=str(text), tokens=128)
    text.write_text((home / "text.txt").read_text()[:-100])
    with pytest.raises(ResumeError, match="the training text or the tokenizer has changed since"):
        run(home, tmp_path / "own", data=str(text))


@pytest.mark.parametrize("damage", ["truncated", "missing", "record"])
def test_a_damaged_checkpoint_is_passed_over_aloud(
    whole: Path, tmp_path: Path, damage: str
) -> None:
    output = tmp_path / "run"
    shutil.copytree(whole, output)
    (output / "summary.json").unlink()
    newest = output / "checkpoints" / "step-000006"
    tensors = next(newest.glob("*.distcp"))
    if damage == "truncated":
        os.truncate(tensors, tensors.stat().st_size - 1000)
    elif damage == "missing":
        tensors.unlink()
    else:
        os.truncate(newest / "run.json", 100)
    said: list[str] = []
    uptrain_checkpoint(
        whole.with_suffix(".yaml"),
        [f"output={output}", "keep_checkpoints=1"],
        on_message=said.append,
    )
    assert any("step-000006 is damaged" in line for line in said)
    assert any("resuming from" in line and "step-000004" in line for line in said)
    assert weights(output) == weights(whole)
    assert sorted(path.name for path in (output / "checkpoints").iterdir()) == ["step-000006"]


def nan_at(monkeypatch: pytest.MonkeyPatch, steps: set[int], above: float = 0.0) -> None:
    """Losses are not finite at these steps, unless the learning rate is small."""
    from gqa_convert.training.trainer import Trainer

    original = Trainer.loss

    def loss(self: Any, model: Any, batch: Any, *weights: float) -> Any:
        found = original(self, model, batch, *weights)
        bad = weights and self.progress.step + 1 in steps and self.recipe.learning_rate > above
        return found._replace(sum=found.sum * float("nan")) if bad else found

    monkeypatch.setattr(Trainer, "loss", loss)


def test_a_checkpoint_before_the_first_update_changes_nothing(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its moments are zero, and count no step."""
    nan_at(monkeypatch, {1, 2})
    run(home, tmp_path / "unsaved", optimizer="adafactor", tokens=256, save_every=100)
    run(home, tmp_path / "saved", optimizer="adafactor", tokens=256, save_every=2)
    assert metrics(tmp_path / "saved") == metrics(tmp_path / "unsaved")
    assert weights(tmp_path / "saved") == weights(tmp_path / "unsaved")


def test_a_step_without_a_finite_loss_is_skipped(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nan_at(monkeypatch, {3, 4})
    said: list[str] = []
    output = tmp_path / "run"
    run(home, output, tokens=64, keep_checkpoints=1)
    uptrain_checkpoint(output.with_suffix(".yaml"), ["tokens=384"], on_message=said.append)
    lines = metrics(output)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert ["loss" in line for line in lines] == [True, True, False, False, True, True]
    assert [line.get("skipped", False) for line in lines] == [
        False,
        False,
        True,
        True,
        False,
        False,
    ]
    assert json.loads((output / "summary.json").read_text())["skipped_steps"] == 2
    assert sum("not finite" in line for line in said) == 2


def test_divergence_ends_a_run_that_can_go_on_otherwise(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nan_at(monkeypatch, set(range(4, 100)), above=5e-4)
    output = tmp_path / "run"
    keys = {"tokens": 12 * 64, "keep_checkpoints": 1}
    with pytest.raises(
        DivergedError,
        match=(
            r"5 consecutive steps up to step 8 .*: run again from the last checkpoint with a lower"
        ),
    ):
        run(home, output, **keys)
    saved = sorted(path.name for path in (output / "checkpoints").iterdir())
    assert saved == ["step-000002", "step-000004", "step-000006"]  # of a streak nothing is removed
    with pytest.raises(ResumeError, match="seed was 0 and is now 1"):
        run(home, output, **keys, seed=1)
    summary = run(home, output, **keys, learning_rate=1e-4)
    assert summary["changes"] == ["from step 7: learning_rate was 0.001 and is now 0.0001"]
    assert sorted(path.name for path in (output / "checkpoints").iterdir()) == ["step-000012"]


def test_a_run_does_not_go_on_with_other_inputs(home: Path, tmp_path: Path) -> None:
    held_out, model = tmp_path / "held-out.txt", tmp_path / "model"
    held_out.write_text((home / "other.txt").read_text())
    shutil.copytree(home / "student", model)
    keys = {
        "model": str(model),
        "evaluation_data": str(held_out),
        "schedule": "constant",
        "warmup_steps": 0,
    }
    run(home, tmp_path / "run", **keys, tokens=2 * 64)
    for changed, name in (
        (held_out, "the evaluation data"),
        (model / "model.safetensors", "the checkpoint of model"),
    ):
        before = changed.read_bytes()
        middle, other = len(before) // 2, b"def f(): pass\n" * (len(before) // 40)
        changed.write_bytes(before[:middle] + other + before[middle + len(other) :])
        with pytest.raises(ResumeError, match=f"^{name} has changed since .*step-000002 was saved"):
            run(home, tmp_path / "run", **keys, tokens=4 * 64)
        changed.write_bytes(before)
    assert run(home, tmp_path / "run", **keys, tokens=4 * 64)["steps"] == 4


def stopped_and_turned_into(error: Exception | None) -> None:
    with StopRequests():
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except StoppedError as stopped:
            raise error or stopped from None


def test_a_signal_is_an_error_at_once() -> None:
    """Also if the code that it interrupts makes another error of it, unless that has a line of its
    own.
    """
    with pytest.raises(StoppedError, match="SIGINT between two stages"):
        stopped_and_turned_into(None)
    with pytest.raises(StoppedError, match="SIGINT between two stages"):
        stopped_and_turned_into(ImportError("torch is half there"))
    with pytest.raises(DataError):
        stopped_and_turned_into(DataError("no text"))


def test_leaving_does_not_import_torch_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # to import it is an error now
    with pytest.raises(StoppedError, match="early"), taking_part():
        raise StoppedError("early")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True
    )
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
def test_a_full_disk_leaves_what_is_there(
    home: Path, whole: Path, disk: Path, size: int, saved: list[int]
) -> None:
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
