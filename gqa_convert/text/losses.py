"""Losses of uptraining as (sum, count) pairs, which are summed over micro-batches and processes before the division.

Shape legend: b batch, L positions, V vocabulary, n = b * L, d hidden_size.

Logits are the largest tensors of a step; `linear_losses` computes the same without ever holding all of them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gqa_convert.text.loss_terms import (
    CombinedLoss,
    Terms,
    check_shapes,
    check_weight,
    combined,
    evaluate,
    rows_at_once,
    scale_into,
    weighted,
)


def lm_loss(logits: Tensor, labels: Tensor, *, overwrite: bool = False) -> tuple[Tensor, Tensor]:
    """Cross-entropy in nats, as (sum, count).

    Args:
        logits: [b, L, V].
        labels: [b, L], the token to predict at each position (already shifted), or -100.
        overwrite: see `combined_loss`.

    Returns:
        The sum over the labelled positions and their number, both float32.
    """
    loss = combined_loss(logits, labels, overwrite=overwrite)
    return loss.sum, loss.count


def kl_loss(
    student: Tensor,
    teacher: Tensor,
    labels: Tensor,
    *,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor]:
    """Forward KL(teacher || student) (Hinton et al. 2015).

    Args:
        student: [b, L, V], logits.
        teacher: logits [b, L, V]; receives no gradient.
        labels: [b, L]; positions with -100 are ignored.
        overwrite: see `combined_loss`.

    Returns:
        The sum over the labelled positions and their number, both float32.
    """
    loss = combined_loss(student, labels, teacher, weight=1.0, overwrite=overwrite)
    return loss.sum, loss.count


def combined_loss(
    logits: Tensor,
    labels: Tensor,
    teacher: Tensor | None = None,
    *,
    weight: float = 0.0,
    z_loss: float = 0.0,
    overwrite: bool = False,
) -> CombinedLoss:
    """Compute (1 - weight) * `lm_loss` + weight * `kl_loss` in one pass over the logits.

    Vocabularies padded to different sizes are compared in the part that they share; both distributions are conditioned
    on it.

    Args:
        logits: [b, L, V], the student's.
        labels: [b, L], next tokens, or -100 for positions to ignore.
        teacher: the teacher's logits [b, L, V].
        weight: the weight of the divergence, from 0 (cross-entropy only) to 1 (divergence only).
        z_loss: the weight of log(Z)^2, which is added; Z is the sum of the exponentials of a position's logits. T5 and PaLM
            were pretrained with 1e-4, which keeps the logits from drifting.
        overwrite: write the gradient into the memory of the logits, which are lost when this function returns. The loss
            then needs no extra memory of the logits' size, and only one backward pass is possible.

    Returns:
        The sums over the labelled positions and their number, in float32.

    Raises:
        OptionError: an option is out of range, or the shapes do not match.
    """
    check_weight(weight)
    teacher = weighted(teacher, weight)
    check_shapes(logits, labels, teacher)
    differentiable = torch.is_grad_enabled() and logits.requires_grad
    terms = Terms(weight, z_loss)
    return combined(_Loss.apply(logits, labels, teacher, terms, differentiable, overwrite), labels, terms)


class _Loss(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        teacher: Tensor | None,
        terms: Terms,
        differentiable: bool,
        overwrite: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        flat = logits.detach().reshape(-1, logits.shape[-1])
        gradient = (flat if overwrite else torch.empty_like(flat)) if differentiable else None
        flat_teacher = None if teacher is None else teacher.detach().reshape(-1, teacher.shape[-1])
        found = evaluate(flat, labels, flat_teacher, terms, gradient).totals(labels.shape, terms)
        if gradient is not None:
            ctx.save_for_backward(gradient.view(logits.shape))
        ctx.overwrite = overwrite
        ctx.mark_non_differentiable(*found[1:])
        return found

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, scale: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        scaled = gradient if ctx.overwrite else torch.empty_like(gradient)
        source, target = (tensor.view(-1, gradient.shape[-1]) for tensor in (gradient, scaled))
        rows = rows_at_once(source)
        for old, new in zip(source.split(rows), target.split(rows), strict=True):
            scale_into(old, scale, new)
        return scaled, *[None] * 5
