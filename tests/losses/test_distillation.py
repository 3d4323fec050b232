"""Losses of whole logits and of the input of an output layer, against the plain formulas in
float64.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from gqa_convert.losses import distillation
from gqa_convert.losses.distillation import (
    combined_loss,
    labelled_positions,
    summed_divergence,
    token_losses,
)
from gqa_convert.losses.output_layer import OutputLayer
from tests.helpers.largest import LargestWith

BATCH, LENGTH, SIZE, VOCAB = 3, 7, 11, 37


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of five positions at a time, three rows of them at once; the last ones are fewer."""
    monkeypatch.setattr(distillation, "_POSITIONS", 5)
    monkeypatch.setattr(distillation, "_rows_at_once", lambda logits: 3)


def numbers(
    *shape: int, seed: int, dtype: torch.dtype = torch.float64, scale: float = 1.0
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)


def made(
    dtype: torch.dtype = torch.float64, *, vocab: int = VOCAB, seed: int = 0, scale: float = 2.0
) -> Tensor:
    return numbers(BATCH, LENGTH, vocab, seed=seed, dtype=dtype, scale=scale)


def made_labels(vocab: int = VOCAB) -> Tensor:
    labels = torch.randint(vocab, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    labels[0, 2] = labels[2, 5:] = -100
    return labels


def plain(
    logits: Tensor, labels: Tensor, teacher: Tensor | None, weight: float, z_loss: float
) -> Tensor:
    """The formula, in torch's own terms."""
    lm = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    z = logits.logsumexp(-1).square()[labels != -100].sum()
    total = (1 - weight) * lm + z_loss * z
    if teacher is None:
        return total
    shared = min(logits.shape[-1], teacher.shape[-1])
    p, log_q = teacher[..., :shared].softmax(-1), logits[..., :shared].log_softmax(-1)
    return total + weight * (p * (p.log() - log_q)).sum(-1)[labels != -100].sum()


def value_and_gradients(loss: Callable[..., Tensor], *leaves: Tensor) -> list[Tensor]:
    leaves = tuple(leaf.clone().requires_grad_() for leaf in leaves)
    value = 3.7 * loss(leaves[0] * 1.0, *leaves[1:])  # not a leaf, as the logits of a model
    return [value.detach(), *torch.autograd.grad(value, leaves)]


@pytest.mark.parametrize(
    ("weight", "vocab", "z_loss"),
    [
        (0.0, VOCAB, 0.02),
        (0.3, VOCAB, 0.0),
        (1.0, VOCAB, 0.02),
        (0.4, VOCAB - 4, 0.02),
        (0.4, VOCAB + 3, 0.0),
    ],
)
def test_losses_of_logits_are_the_plain_formula(weight: float, vocab: int, z_loss: float) -> None:
    """Vocabularies padded to different sizes are compared where both have tokens."""
    labels, teacher = made_labels(VOCAB - 4), made(vocab=vocab, seed=2)
    ours = value_and_gradients(
        lambda x: combined_loss(x, labels, teacher, weight=weight, z_loss=z_loss).sum, made()
    )
    wanted = value_and_gradients(lambda x: plain(x, labels, teacher, weight, z_loss), made())
    torch.testing.assert_close(ours, wanted, rtol=1e-10, atol=1e-10)
    found = combined_loss(made(), labels, teacher, weight=weight)
    assert found.count == (labels != -100).sum()
    torch.testing.assert_close(found.lm, plain(made(), labels, None, 0.0, 0.0))
    torch.testing.assert_close(
        found.kl, plain(made(), labels, teacher, 1.0, 0.0) if weight else torch.zeros_like(found.kl)
    )


@pytest.mark.parametrize(
    ("kind", "cap", "weight", "z_loss"),
    [
        ("states", None, 0.0, 0.02),
        ("states", 2.0, 0.3, 0.0),
        ("logits", 2.0, 1.0, 0.02),
        ("logits", None, 0.3, 0.0),
        ("capped", None, 1.0, 0.0),
        ("labelled", 2.0, 0.3, 0.02),
        ("labelled", None, 1.0, 0.0),
    ],
)
def test_losses_of_states_are_those_of_logits(
    kind: str, cap: float | None, weight: float, z_loss: float
) -> None:
    """With biases, and a teacher of another size and a smaller vocabulary."""
    labels = made_labels()
    labelled = torch.from_numpy(labelled_positions(labels.numpy())) if kind == "labelled" else None
    leaves = [
        numbers(BATCH, LENGTH, SIZE, seed=0),
        numbers(VOCAB, SIZE, seed=1),
        numbers(VOCAB, seed=2),
    ]
    theirs = numbers(BATCH, LENGTH, SIZE + 2, seed=5)
    their_layer = OutputLayer(
        numbers(VOCAB - 4, SIZE + 2, seed=6), None, 3.0 if kind == "capped" else None
    )
    logits = their_layer.logits(theirs)
    teacher = (logits, None) if kind == "logits" else (theirs, their_layer)

    def ours(states: Tensor, matrix: Tensor, bias: Tensor) -> Tensor:
        layers = {"layer": OutputLayer(matrix, bias, cap), "teacher_layer": teacher[1]}
        found = combined_loss(
            states, labels, teacher[0], labelled=labelled, weight=weight, z_loss=z_loss, **layers
        )
        return found.sum

    def wanted(states: Tensor, matrix: Tensor, bias: Tensor) -> Tensor:
        return plain(OutputLayer(matrix, bias, cap).logits(states), labels, logits, weight, z_loss)

    torch.testing.assert_close(
        value_and_gradients(ours, *leaves), value_and_gradients(wanted, *leaves)
    )


@pytest.mark.parametrize("with_layer", [False, True])
def test_no_labels_no_loss(with_layer: bool) -> None:
    labels = torch.full((BATCH, LENGTH), -100)
    output = numbers(BATCH, LENGTH, SIZE if with_layer else VOCAB, seed=0).requires_grad_()
    layer = OutputLayer(numbers(VOCAB, SIZE, seed=1)) if with_layer else None
    labelled = torch.from_numpy(labelled_positions(labels.numpy()))
    loss = combined_loss(
        output * 1, labels, made(seed=2), layer=layer, labelled=labelled, weight=0.5
    )
    loss.sum.backward()
    assert (float(loss.sum.detach()), float(loss.count)) == (0.0, 0.0)
    assert output.grad is not None
    assert not output.grad.any()


def test_half_precision_is_summed_in_float32() -> None:
    labels, teacher = made_labels(), made(torch.bfloat16, seed=2, scale=4.0)
    logits = made(torch.bfloat16, scale=4.0)
    for weight in (0.0, 0.5, 1.0):
        loss = combined_loss(logits, labels, teacher, weight=weight)
        assert loss.sum.dtype == loss.count.dtype == torch.float32
        ours = value_and_gradients(
            lambda x, weight=weight: combined_loss(x, labels, teacher, weight=weight).sum, logits
        )
        exact = value_and_gradients(
            lambda x, weight=weight: plain(x, labels, teacher.double(), weight, 0.0),
            logits.double(),
        )
        torch.testing.assert_close(ours[0].double(), exact[0], rtol=2e-6, atol=1e-6)
        assert ours[1].dtype == torch.bfloat16
        torch.testing.assert_close(ours[1].double(), exact[1], rtol=2**-7, atol=1e-8)


def test_logits_are_overwritten_where_they_are_differentiated() -> None:
    labels, logits = made_labels(), made().requires_grad_()
    hidden = logits * 1.0
    loss = combined_loss(hidden, labels).sum
    assert not torch.equal(hidden, logits)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    hidden = torch.tanh(logits)  # whose gradient needs its result: torch notices
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        combined_loss(hidden, labels).sum.backward()
    kept = made()
    combined_loss(kept, labels)
    with torch.no_grad():
        combined_loss(kept.requires_grad_(), labels)
    assert torch.equal(kept, made())  # nothing to learn: nothing is overwritten


@pytest.mark.parametrize("trained", [(0,), (1,), (0, 1)], ids=["states", "weights", "both"])
def test_only_what_is_trained_gets_gradients(trained: tuple[int, ...]) -> None:
    leaves = [numbers(BATCH, LENGTH, SIZE, seed=0), numbers(VOCAB, SIZE, seed=1)]
    for at in trained:
        leaves[at].requires_grad_()
    teacher = made(seed=2).requires_grad_()
    combined_loss(
        leaves[0], made_labels(), teacher, layer=OutputLayer(leaves[1]), weight=0.5
    ).sum.backward()
    assert [each.grad is not None for each in leaves] == [at in trained for at in range(2)]
    assert teacher.grad is None


def test_positions_without_a_label_are_left_out() -> None:
    """A state without a label may hold anything, and no logits are made of it."""
    states, layer = numbers(BATCH, LENGTH, SIZE, seed=0), OutputLayer(numbers(VOCAB, SIZE, seed=1))
    targets = torch.full((BATCH, LENGTH), -100)
    targets[1, 3] = 5
    found = labelled_positions(targets.numpy())
    assert found is not None
    assert found.tolist() == [LENGTH + 3]
    assert labelled_positions(np.zeros((2, 3), np.int64)) is None
    states[targets == -100] = torch.nan
    states.requires_grad_()
    with LargestWith(VOCAB, SIZE) as largest:
        loss = combined_loss(states, targets, layer=layer, labelled=torch.from_numpy(found))
        loss.sum.backward()
    assert largest.rows == 1
    assert loss.sum.isfinite()
    assert states.grad is not None
    assert (states.grad != 0).any(-1).nonzero().tolist() == [[1, 3]]


def test_in_bfloat16_under_autocasting() -> None:
    """Products of float32 weights in bfloat16, gradients in float32, as near to exact ones as
    those of whole logits.
    """
    exact = [numbers(BATCH, LENGTH, SIZE, seed=0), numbers(VOCAB, SIZE, seed=1)]

    def gradients(dtype: torch.dtype, *, whole: bool) -> list[Tensor]:
        leaves = [each.to(dtype).requires_grad_() for each in exact]
        layer = OutputLayer(leaves[1])
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            if whole:
                found = combined_loss(layer.logits(leaves[0]), made_labels())
            else:
                found = combined_loss(leaves[0], made_labels(), layer=layer)
        assert found.sum.dtype == dtype
        return list(torch.autograd.grad(0.1 * found.sum, leaves))

    wanted = gradients(torch.float64, whole=True)
    ours, theirs = gradients(torch.float32, whole=False), gradients(torch.float32, whole=True)
    for mine, other, right in zip(ours, theirs, wanted, strict=True):
        assert mine.dtype == torch.float32
        error, allowed = ((each - right).norm() / right.norm() for each in (mine, other))
        assert 0 < error < 1.2 * allowed


def test_losses_of_each_token() -> None:
    labels, teacher = made_labels().flatten(), made(seed=2).flatten(0, 1)
    lm, kl = token_losses(made().flatten(0, 1), labels, teacher)
    torch.testing.assert_close(lm.sum(), plain(made(), made_labels(), None, 0.0, 0.0))
    torch.testing.assert_close(kl.sum(), plain(made(), made_labels(), made(seed=2), 1.0, 0.0))
    assert not lm[labels == -100].any()
    assert not kl[labels == -100].any()


def test_tokens_without_probability_add_nothing() -> None:
    """Where both predictions exclude a token."""
    student, teacher, labels = made(), made(seed=2), made_labels(5)
    student[..., 5] = teacher[..., 5] = -torch.inf
    keep = [token for token in range(VOCAB) if token != 5]
    found, gradient = value_and_gradients(
        lambda x: combined_loss(x, labels, teacher, weight=1.0).sum, student
    )
    wanted = plain(student[..., keep], labels, teacher[..., keep], 1.0, 0.0)
    torch.testing.assert_close(found, 3.7 * wanted)
    assert gradient.isfinite().all()
    student[..., 0] = teacher[..., 0] = -torch.inf
    assert summed_divergence(student, teacher).isfinite()
