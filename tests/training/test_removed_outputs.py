"""Runs without output layers take the steps of runs with them, and never hold the logits of a micro-batch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gqa_convert.losses import distillation
from gqa_convert.training import models
from gqa_convert.training.uptrain import uptrain_checkpoint
from tests.helpers.largest import LargestWith
from tests.helpers.uptrain_runs import DEMO, metrics, recipe, run, student_home

PART = 24
VOCABULARY, HIDDEN_SIZE = 2048, 192  # of the bundled model


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with student_home(tmp_path_factory.mktemp("home")) as folder:
        yield folder


def test_steps_are_those_of_whole_logits(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In training and in evaluation, of the student and of the teacher, no logits of a whole micro-batch are made."""
    keys: dict[str, Any] = {"tokens": 2 * 64, "micro_batch_size": 2, "evaluation_data": str(home / "other.txt")}
    keys |= {"teacher": str(DEMO), "distillation_weight": 0.6, "evaluate_every": 1, "z_loss": 1e-3}
    monkeypatch.setattr(distillation, "_POSITIONS", PART)
    with LargestWith(VOCABULARY, HIDDEN_SIZE) as largest:
        run(home, tmp_path / "parts", **keys)
    assert largest.rows == PART
    monkeypatch.setattr(models, "remove_output_layer", lambda model, inputs: False)
    messages: list[str] = []
    uptrain_checkpoint(recipe(home, tmp_path / "whole", **keys), [], on_message=messages.append)
    said = "makes the logits of a batch at once: expect more memory than was estimated"
    assert any(message.endswith(said) for message in messages)
    for found, expected in zip(metrics(tmp_path / "parts"), metrics(tmp_path / "whole"), strict=True):
        assert found == pytest.approx(expected, rel=1e-4)
