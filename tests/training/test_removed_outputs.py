"""Runs without output layers take the steps of runs with them, and never hold the logits of a micro-batch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from gqa_convert.text import linear_losses
from gqa_convert.training import run_models
from gqa_convert.training.uptrain import uptrain_checkpoint
from tests.helpers.largest import LargestWith
from tests.helpers.uptrain_runs import DEMO, metrics, recipe, run, student_home

PART = 24
VOCABULARY, HIDDEN_SIZE = 2048, 192  # of the bundled model


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with student_home(tmp_path_factory.mktemp("home")) as folder:
        yield folder


DISTILLED: dict[str, Any] = {"teacher": str(DEMO), "distillation_weight": 0.6, "evaluate_every": 1}


def few_steps(home: Path, **keys: Any) -> dict[str, Any]:
    return {"tokens": 2 * 64, "micro_batch_size": 2, "evaluation_data": str(home / "other.txt"), **keys}


def in_parts(layer: Any, states: Tensor) -> Tensor:
    """A linear layer; logits are of as many positions at a time as the loss in parts has, because on some processors a
    product of few rows in bfloat16 is rounded otherwise than one of many."""
    if layer.out_features != VOCABULARY:
        return linear(states, layer.weight, layer.bias)
    parts = [linear(part, layer.weight, layer.bias) for part in states.flatten(0, -2).split(PART)]
    return torch.cat(parts).unflatten(0, states.shape[:-1])


@pytest.mark.parametrize(
    "keys", [DISTILLED, {"z_loss": 1e-3, "precision": "bf16", "tokens": 64}], ids=["distilled", "bf16"]
)
def test_steps_are_those_of_whole_logits(
    keys: dict[str, Any], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_losses, "_POSITIONS", PART)
    run(home, tmp_path / "parts", **few_steps(home, **keys))
    monkeypatch.setattr(run_models, "remove_output_layer", lambda model, inputs: False)
    monkeypatch.setattr(torch.nn.Linear, "forward", in_parts)
    messages: list[str] = []
    uptrain_checkpoint(recipe(home, tmp_path / "whole", **few_steps(home, **keys)), [], on_message=messages.append)
    said = "makes the logits of a batch at once: expect more memory than was estimated"
    assert any(message.endswith(said) for message in messages)
    pairs = list(zip(metrics(tmp_path / "parts"), metrics(tmp_path / "whole"), strict=True))
    assert pairs
    for found, expected in pairs:
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=1e-5), name


def test_no_logits_of_a_whole_micro_batch(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in training nor in evaluation, of the student or of the teacher."""
    monkeypatch.setattr(linear_losses, "_POSITIONS", PART)
    with LargestWith(VOCABULARY, HIDDEN_SIZE) as largest:
        run(home, tmp_path / "run", **few_steps(home, **DISTILLED))
    assert largest.rows == PART
