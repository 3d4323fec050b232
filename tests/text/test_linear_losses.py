"""Losses from the input of an output layer, against those of its whole logits."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gqa_convert.errors import OptionError
from gqa_convert.text import linear_losses, loss_terms
from gqa_convert.text.linear_losses import labelled_positions, linear_loss
from gqa_convert.text.loss_terms import CombinedLoss
from gqa_convert.text.losses import combined_loss
from gqa_convert.text.output_layers import OutputLayer, remove_output_layer, removed_output_layer
from tests.helpers.largest import LargestWith
from tests.helpers.tiny import make_config, make_model

BATCH, LENGTH, SIZE, VOCAB = 3, 7, 11, 37


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of five positions at a time, the last chunk smaller."""
    monkeypatch.setattr(linear_losses, "_POSITIONS", 5)
    monkeypatch.setattr(loss_terms, "rows_at_once", lambda logits: 3)


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def labels() -> Tensor:
    found = torch.randint(VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    found[0, 2] = found[2, 5:] = -100
    return found


def assert_same(ours: CombinedLoss, wanted: CombinedLoss, leaves: list[Tensor]) -> None:
    for found, expected in zip(ours, wanted, strict=True):
        assert (found is None) == (expected is None)
        if found is not None:
            torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(3.7 * each.sum, leaves) for each in (ours, wanted)]
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("options", [{}, {"z_loss": 0.02}], ids=str)
@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("kind", ["states", "logits", "capped", "labelled"])
def test_as_of_whole_logits(kind: str, cap: float | None, weight: float, options: dict[str, Any]) -> None:
    """With biases, and a teacher of another size and a smaller vocabulary."""
    labelled = torch.from_numpy(labelled_positions(labels().numpy())) if kind == "labelled" else None
    leaves = [
        numbers(*shape, seed=seed).requires_grad_()
        for seed, shape in enumerate([(BATCH, LENGTH, SIZE), (VOCAB, SIZE), (VOCAB,)])
    ]
    states, layer = leaves[0], OutputLayer(*leaves[1:], cap)
    theirs = numbers(BATCH, LENGTH, SIZE + 2, seed=5)
    their_layer = OutputLayer(numbers(VOCAB - 4, SIZE + 2, seed=6), None, 3.0 if kind == "capped" else None)
    logits = their_layer.logits(theirs)
    teacher = (logits, None) if kind == "logits" else (theirs, their_layer)
    ours = linear_loss(states, layer, labels(), *teacher, labelled=labelled, weight=weight, **options)
    wanted = combined_loss(layer.logits(states), labels(), logits, weight=weight, **options)
    assert_same(ours, wanted, leaves)


@pytest.mark.parametrize("trained", [(0,), (1,), (0, 1)], ids=["states", "weights", "both"])
def test_only_what_is_trained_gets_gradients(trained: tuple[int, ...]) -> None:
    leaves = [numbers(BATCH, LENGTH, SIZE, seed=0), numbers(VOCAB, SIZE, seed=1)]
    for at in trained:
        leaves[at].requires_grad_()
    linear_loss(leaves[0], OutputLayer(leaves[1]), labels()).sum.backward()
    assert [each.grad is not None for each in leaves] == [at in trained for at in range(2)]


def test_labelled_positions() -> None:
    some = labels().numpy()
    found = labelled_positions(some)
    assert found is not None
    assert found.tolist() == [place for place, label in enumerate(some.flatten()) if label != -100]
    some[some == -100] = 0
    assert labelled_positions(some) is None
    nothing = labelled_positions(np.full((2, 3), -100))
    assert nothing is not None
    assert nothing.tolist() == [0]


def test_other_positions_are_left_out() -> None:
    """A state without a label may hold anything, and no logits are made of it."""
    states, layer = numbers(BATCH, LENGTH, SIZE, seed=0), OutputLayer(numbers(VOCAB, SIZE, seed=1))
    targets = torch.full((BATCH, LENGTH), -100)
    targets[1, 3] = 5
    states[targets == -100] = torch.nan
    states.requires_grad_()
    with LargestWith(VOCAB, SIZE) as largest:
        found = linear_loss(states, layer, targets, labelled=torch.tensor([LENGTH + 3]))
        found.sum.backward()
    assert largest.rows == 1
    assert found.sum.isfinite()
    assert states.grad is not None
    assert (states.grad != 0).any(-1).nonzero().tolist() == [[1, 3]]


def test_without_gradients() -> None:
    states, layer = numbers(BATCH, LENGTH, SIZE, seed=0), OutputLayer(numbers(VOCAB, SIZE, seed=1).requires_grad_())
    with torch.no_grad():
        found = linear_loss(states, layer, labels())
    assert not found.sum.requires_grad
    torch.testing.assert_close(found.sum, combined_loss(layer.logits(states), labels()).sum.detach())


def test_in_bfloat16_under_autocasting() -> None:
    """Products of float32 weights in bfloat16, gradients in float32, as near to exact ones as those of whole logits."""
    exact = [numbers(BATCH, LENGTH, SIZE, seed=0), numbers(VOCAB, SIZE, seed=1)]

    def gradients(loss: Callable[[Tensor, OutputLayer], CombinedLoss], dtype: torch.dtype) -> list[Tensor]:
        leaves = [each.to(dtype).requires_grad_() for each in exact]
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            found = loss(leaves[0], OutputLayer(leaves[1]))
        assert found.sum.dtype == dtype
        return list(torch.autograd.grad(0.1 * found.sum, leaves))

    def plain(states: Tensor, layer: OutputLayer) -> CombinedLoss:
        return combined_loss(layer.logits(states), labels())

    wanted = gradients(plain, torch.float64)
    ours = gradients(lambda states, layer: linear_loss(states, layer, labels()), torch.float32)
    whole = gradients(plain, torch.float32)
    for mine, theirs, right in zip(ours, whole, wanted, strict=True):
        assert mine.dtype == torch.float32
        error, allowed = ((each - right).norm() / right.norm() for each in (mine, theirs))
        assert 0 < error < 1.2 * allowed


def test_bad_options() -> None:
    states, layer = numbers(BATCH, LENGTH, SIZE, seed=0), OutputLayer(numbers(VOCAB, SIZE, seed=1))
    for options in ({"weight": 0.5}, {"weight": 2.0}, {"teacher": states[:1], "weight": 1.0}):
        with pytest.raises(OptionError):
            linear_loss(states, layer, labels(), **options)


@pytest.fixture
def models(request: pytest.FixtureRequest) -> tuple[Any, ...]:
    changed = {"vocab_size": 83} | ({"final_logit_softcapping": 2.0} if request.param == "gemma2" else {})
    return tuple(make_model(make_config(request.param, **changed), seed=seed).double() for seed in (0, 1))


@pytest.mark.parametrize("models", ["llama", "gemma2", "phi"], indirect=True)
def test_gradients_of_models(models: tuple[Any, Any]) -> None:
    """All parameters, tied embeddings among them, from student and teacher; and never more logits than of a chunk."""
    student, teacher = models
    vocabulary = student.config.vocab_size
    ids = torch.randint(3, vocabulary, (2, 13), generator=torch.Generator().manual_seed(0))
    targets = ids.roll(-1, 1)
    with torch.no_grad():
        theirs = teacher(input_ids=ids).logits
    combined_loss(student(input_ids=ids).logits, targets, theirs, weight=0.6).sum.backward()
    wanted = {name: parameter.grad for name, parameter in student.named_parameters()}
    student.zero_grad()
    for model in models:
        assert remove_output_layer(model, {"input_ids": ids})
    with LargestWith(vocabulary, student.config.hidden_size) as largest:
        with torch.no_grad():
            theirs = teacher(input_ids=ids).logits
        states, layers = student(input_ids=ids).logits, [removed_output_layer(model) for model in models]
        linear_loss(states, layers[0], targets, theirs, layers[1], weight=0.6).sum.backward()
    assert largest.rows == 5
    for name, parameter in student.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-5, atol=1e-7)
