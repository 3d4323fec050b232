"""Steps whose loss or gradient norm jumps."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gqa_convert.errors import RecipeError, StoppedError
from gqa_convert.training import loop
from gqa_convert.training.checkpoints import Progress, RunRecord
from gqa_convert.training.loop import Trainer
from gqa_convert.training.optimizers import build_optimizer
from gqa_convert.training.recipe import make_recipe
from gqa_convert.training.spikes import SpikeRule, SpikeState, jumps, note
from gqa_convert.training.uptrain import uptrain_checkpoint
from tests.helpers.distributed_steps import BASE, RaggedSamples, small_model
from tests.helpers.uptrain_runs import metrics, recipe, student_home, weights

RULE = SpikeRule(window=3, patience=2)
STEPS = 8
KEYS: dict[str, Any] = {"tokens": STEPS * 64, "save_every": 2, "keep_checkpoints": 1}


def test_a_jump_is_relative_to_the_median_of_a_full_window() -> None:
    assert not jumps(99.0, 1.5, RULE, [1.0, 1.0])
    assert jumps(3.1, 1.5, RULE, [1.0, 2.0, 9.0])
    assert not jumps(3.0, 1.5, RULE, [1.0, 2.0, 9.0])
    assert not jumps(99.0, None, RULE, [1.0, 1.0, 1.0])


def test_patience_ends_with_a_new_window() -> None:
    for action, rewinds in (("skip", False), ("rewind", True)):
        rule, state = SpikeRule(window=3, patience=2, action=action), SpikeState()  # type: ignore[arg-type]
        for number in (1.0, 2.0, 3.0, 4.0):
            assert not note(rule, state, number, 10 * number, jumped=False)
        assert (state.losses, state.norms) == ([2.0, 3.0, 4.0], [20.0, 30.0, 40.0])
        assert not note(rule, state, 99.0, 99.0, jumped=True)
        assert state.in_a_row == 1
        assert note(rule, state, 99.0, 99.0, jumped=True) == rewinds
        assert (state.losses, state.norms, state.in_a_row, state.skipped) == ([], [], 0, 2)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "spike is 3: it must be a mapping such as {window: 50, action: rewind}"),
        ({"factor": 3}, "spike has an unknown key 'factor'"),
        ({"loss_factor": 1}, "spike.loss_factor is 1: it must be a number above 1"),
        ({"action": "stop"}, "spike.action is stop: it must be skip or rewind"),
        ({"loss_factor": None, "norm_factor": None}, "spike has neither a loss_factor nor a norm_factor"),
    ],
)
def test_rules_that_make_no_sense_are_refused(value: Any, message: str) -> None:
    with pytest.raises(RecipeError) as raised:
        make_recipe(BASE | {"spike": value})
    assert message in str(raised.value)


def test_a_rule_survives_the_resolved_recipe_and_a_record() -> None:
    made = make_recipe(BASE | {"spike": {"window": "20", "action": "rewind"}})
    assert made.spike == SpikeRule(window=20, action="rewind")
    assert make_recipe(json.loads(json.dumps(made.resolved()))) == made
    assert "spike was" in made.differences(make_recipe(BASE))[0]
    progress = Progress(step=3, spikes=SpikeState([0.1, 1 / 3], [2.0], 1, 4, 1))
    record = RunRecord(progress=progress, recipe={}, processes=1, samples="s", sha256={}, files={}, dataset_commits={})
    assert RunRecord.from_json(json.loads(json.dumps(record.as_json()))) == record


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with student_home(tmp_path_factory.mktemp("spikes")) as folder:
        yield folder


@pytest.fixture
def jump(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The steps whose loss is multiplied by 3."""
    steps, original = set[int](), Trainer.losses

    def losses(self: Trainer, batch: Any) -> Any:
        loss, parts, by_sequence = original(self, batch)
        return (3 * loss, 3 * parts, by_sequence) if self.progress.step + 1 in steps else (loss, parts, by_sequence)

    monkeypatch.setattr(Trainer, "losses", losses)
    return steps


def go(home: Path, output: Path, stop_at: int = 0, **spike: Any) -> list[str]:
    """Run; returns the messages. A run that is to stop does so after a step."""
    said: list[str] = []

    def on_step(report: Any) -> None:
        if report.line.step == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    path = recipe(home, output, spike={"window": 2, "norm_factor": None} | spike, **KEYS)
    uptrain_checkpoint(path, [], on_message=said.append, on_step=on_step)
    return said


def test_a_jump_is_skipped_and_a_resumed_run_decides_alike(home: Path, tmp_path: Path, jump: set[int]) -> None:
    jump |= {4}
    said = go(home, tmp_path / "whole")
    assert [line["step"] for line in metrics(tmp_path / "whole") if line.get("spiked")] == [4]
    assert sum("jumped; no update" in message for message in said) == 1
    with pytest.raises(StoppedError):
        go(home, tmp_path / "parts", stop_at=3)
    go(home, tmp_path / "parts")
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")


def test_jumps_in_a_row_return_to_a_regular_checkpoint(home: Path, tmp_path: Path, jump: set[int]) -> None:
    """To step 2, also where a stopped run has saved step 3, and although only one checkpoint is kept otherwise."""
    jump |= {4, 5}
    said = go(home, tmp_path / "whole", action="rewind", patience=2)
    change = "after step 5: weights and moments of step 2, because 2 steps in a row jumped"
    assert change in said
    with pytest.raises(StoppedError):
        go(home, tmp_path / "parts", stop_at=3, action="rewind", patience=2)
    assert change in go(home, tmp_path / "parts", action="rewind", patience=2)
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")
    assert json.loads((tmp_path / "parts" / "summary.json").read_text())["changes"] == [change]


def trained(**spike: Any) -> list[int]:
    """The steps that jumped, in a run of a small model."""
    recipe = make_recipe(BASE | {"spike": {"window": 2, "norm_factor": None} | spike})
    model = small_model("llama").train()
    process = SimpleNamespace(num_processes=1, process_index=0, device=torch.device("cpu"))
    trainer = Trainer(
        recipe,
        model,
        build_optimizer(model, recipe),
        RaggedSamples(False),  # type: ignore[arg-type]
        process,
        steps=STEPS,
        teacher=None,
        progress=Progress(),
    )
    return [result.step for result in trainer.run(lambda: False) if result.spiked and result.skipped]


def test_a_level_that_stays_is_accepted(jump: set[int]) -> None:
    jump |= {4, 5, 6, 7, 8}
    assert trained(patience=2) == [4, 5]


def test_a_jump_on_another_process_is_skipped_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process adds its vote to the sums of a step."""
    steps = iter(range(1, STEPS + 1))

    def summed(accelerator: Any, numbers: list[float], *, patiently: bool = False) -> list[float]:
        del accelerator
        return numbers if patiently or next(steps) != 4 else [numbers[0] + 1, *numbers[1:]]

    monkeypatch.setattr(loop, "summed", summed)
    assert trained() == [4]
