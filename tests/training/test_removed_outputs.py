"""Runs without output layers take the steps of runs with them, and never hold the logits of a micro-batch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

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


DISTILLED: dict[str, Any] = {"teacher": str(DEMO), "distillation_weight": 0.6, "evaluate_every": 1}


def few_steps(home: Path, **keys: Any) -> dict[str, Any]:
    return {"tokens": 2 * 64, "micro_batch_size": 2, "evaluation_data": str(home / "other.txt"), **keys}


class LogitsInParts(torch.autograd.Function):
    """Logits of as many positions at a time as the loss in parts has, and gradients by the same products, because
    processors round products in bfloat16 of few rows otherwise than those of many. The logits are held as a whole.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor) -> Tensor:
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else weight.dtype
        ctx.save_for_backward(states.to(dtype), weight.to(dtype))
        ctx.dtypes = states.dtype, weight.dtype
        parts = states.to(dtype).flatten(0, -2).split(PART)
        return torch.cat([linear(part, weight.to(dtype)) for part in parts]).unflatten(0, states.shape[:-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (states, weight), (of_states, of_weight) = ctx.saved_tensors, ctx.dtypes
        gradients, parts = (each.flatten(0, -2).split(PART) for each in (gradient, states))
        back = torch.cat([each @ weight for each in gradients]).to(of_states).view(states.shape)
        return back, sum((each.T @ part).to(of_weight) for each, part in zip(gradients, parts, strict=True))  # type: ignore[return-value]


def in_parts(layer: Any, states: Tensor) -> Tensor:
    """A linear layer's result, logits by `LogitsInParts`."""
    if layer.out_features != VOCABULARY:
        return linear(states, layer.weight, layer.bias)
    assert layer.bias is None
    return LogitsInParts.apply(states, layer.weight)  # type: ignore[no-any-return,no-untyped-call]


@pytest.mark.parametrize(
    "keys", [DISTILLED, {"z_loss": 1e-3, "precision": "bf16", "tokens": 64}], ids=["distilled", "bf16"]
)
def test_steps_are_those_of_whole_logits(
    keys: dict[str, Any], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distillation, "_POSITIONS", PART)
    run(home, tmp_path / "parts", **few_steps(home, **keys))
    monkeypatch.setattr(models, "remove_output_layer", lambda model, inputs: False)
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
    monkeypatch.setattr(distillation, "_POSITIONS", PART)
    with LargestWith(VOCABULARY, HIDDEN_SIZE) as largest:
        run(home, tmp_path / "run", **few_steps(home, **DISTILLED))
    assert largest.rows == PART
