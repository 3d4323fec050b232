"""The losses of uptraining and of fit: cross-entropy with the text, and the divergence from a
teacher.

Logits are a batch's largest tensor by far. They are made for some positions at a time where the
output layer was taken out of the model (`output_layer`), and each part's gradient is computed at
once, in the forward pass, so that no logits are kept, as in Liger (Hsu et al. 2024, section 3.2).
Computing them again in the backward pass instead would cost a third more of the output layer's
time.

Shape legend: n positions, V tokens of the vocabulary, d hidden_size.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, nll_loss

from gqa_convert.data.sampler import IGNORED

from .output_layer import OutputLayer, capped

CHUNK = 1 << 18
"""The number of logits whose losses a CPU thread computes at a time: 1 MiB in float32, which fits
its cache.
"""
CHUNK_ON_ACCELERATOR = 1 << 24
_POSITIONS = 1024
_PARTS = 8
"""Positions whose logits are made at a time, and into how many parts a batch is divided at most:
with more of them, reading the layer and adding to its gradient would take longer than the products.
"""


class CombinedLoss(NamedTuple):
    """A weighted loss and its parts, each a sum over positions, which is summed over micro-batches
    and processes before it is divided by the count; without a weight the divergence is not computed
    and 0.
    """

    sum: Tensor
    count: Tensor
    lm: Tensor
    """The cross-entropy part. Like `kl` it has no gradient and is only logged."""
    kl: Tensor


class _Terms(NamedTuple):
    """Of a loss; see `combined_loss`."""

    weight: float
    z_loss: float
    cap: float | None
    teacher_layer: OutputLayer | None
    with_gradient: bool
    """Whether any is asked for, which a function of autograd can't see."""


def summed_divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Forward KL(teacher || student) (Hinton et al. 2015), summed over all positions, in nats.

    Args:
        student: [..., V], logits; see `combined_loss`.
        teacher: [..., V], logits; receives no gradient.
    """
    labels = teacher.new_zeros(teacher.shape[:-1], dtype=torch.long)
    return combined_loss(student, labels, teacher, weight=1.0).sum


def combined_loss(
    output: Tensor,
    labels: Tensor,
    teacher: Tensor | None = None,
    *,
    layer: OutputLayer | None = None,
    teacher_layer: OutputLayer | None = None,
    labelled: Tensor | None = None,
    weight: float = 0.0,
    z_loss: float = 0.0,
) -> CombinedLoss:
    """Compute (1 - weight) * cross-entropy + weight * KL(teacher || student) in one pass over the
    logits.

    Vocabularies padded to different sizes are compared in the part that they share; both
    distributions are conditioned on it. Sums and softmaxes are float32 (float64 for float64
    logits). Where a gradient is needed, it overwrites logits that are given, and only one backward
    pass is possible. Products of a layer are computed in its dtype, or that of autocasting; its
    gradient has its dtype.

    Args:
        output: [..., V], the student's logits, or [..., d], the input of its output layer.
        labels: [...], next tokens, or -100 for positions to ignore.
        teacher: [..., V'], the teacher's logits, or [..., d'], the input of its output layer;
            receives no gradient.
        layer: the student's output layer; None if `output` contains logits.
        teacher_layer: the teacher's output layer; None if `teacher` contains logits.
        labelled: [k], the numbers of the positions that have labels, which alone get logits; by
            default all do.
        weight: the weight of the divergence, from 0 (cross-entropy only) to 1 (divergence only).
        z_loss: the weight of log(Z)^2, which is added; Z is the sum of the exponentials of a
            position's logits. T5 and PaLM were pretrained with 1e-4, which keeps the logits from
            drifting.

    Returns:
        The sums over the labelled positions and their number, in float32.
    """
    output = output.flatten(0, -2)
    labels = labels.flatten()
    theirs = teacher.detach().flatten(0, -2) if weight and teacher is not None else None
    if labelled is not None and layer:
        output = output[labelled]
        labels = labels[labelled]
        theirs = None if theirs is None else theirs[labelled]
    weights, bias, cap = layer or (None, None, None)
    terms = _Terms(weight, z_loss, cap, teacher_layer, torch.is_grad_enabled())
    total, lm, kl = _Loss.apply(output, weights, bias, labels, theirs, terms)
    return CombinedLoss(total, (labels != IGNORED).sum().to(total.dtype), lm, kl)


def labelled_positions(labels: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
    """The numbers of the positions that have a label; None if all have.

    Args:
        labels: [b, L], with -100 at positions to ignore.
    """
    found = np.flatnonzero(labels != IGNORED)
    return None if len(found) == labels.size else found


def positions_at_once(positions: int) -> int:
    """The number of positions, of a batch, whose logits are made and held together."""
    return min(positions, max(_POSITIONS, -(-positions // _PARTS)))


def token_losses(
    logits: Tensor, labels: Tensor, teacher: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The cross-entropy of each position, [n], and its divergence from a teacher, [n], 0 without
    one; positions with the label -100 have losses of 0.

    Args:
        logits: [n, V].
        labels: [n].
        teacher: [n, V'], logits.
    """
    return _compare(logits, labels, teacher)[:2]


class _Compared(NamedTuple):
    """The cross-entropy of each position and its divergence, [n]; the logarithms of the student's
    predictions, [n, V], and those of student and teacher over the tokens that they share.
    """

    lm: Tensor
    kl: Tensor
    all: Tensor
    shared: Tensor
    teacher: Tensor | None


def _compare(logits: Tensor, labels: Tensor, teacher: Tensor | None) -> _Compared:
    exact = torch.promote_types(logits.dtype, torch.float32)
    every = shared = logits.log_softmax(-1, dtype=exact)
    lm = nll_loss(every, labels, ignore_index=IGNORED, reduction="none")
    if teacher is None:
        return _Compared(lm, torch.zeros_like(lm), every, shared, None)
    count = min(logits.shape[-1], teacher.shape[-1])
    if count < logits.shape[-1]:
        shared = logits[:, :count].log_softmax(-1, dtype=exact)
    theirs = teacher[:, :count].log_softmax(-1, dtype=exact)
    least = (
        torch.finfo(exact).min / 2
    )  # tokens with probability 0 contribute 0 * (log 0 - log 0) = 0
    terms = theirs.clamp(min=least).sub_(shared.clamp(min=least)).mul_(theirs.exp())
    return _Compared(lm, terms.sum(-1).masked_fill_(labels == IGNORED, 0.0), every, shared, theirs)


class _Loss(torch.autograd.Function):  # type: ignore[misc]
    """The weighted sum of the losses of positions, and the sums of their cross-entropy and
    divergence.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weights: Tensor | None,
        bias: Tensor | None,
        labels: Tensor,
        teacher: Tensor | None,
        terms: _Terms,
    ) -> tuple[Tensor, ...]:
        """See `combined_loss`: states [n, d] and weights [V, d], or logits [n, V] and None."""
        states = states.detach()
        kind = states.device.type
        needed = [terms.with_gradient and asked for asked in ctx.needs_input_grad[:3]]
        dtype = states.dtype if weights is None else weights.dtype
        if weights is not None and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        matrix, offset = (
            None if each is None else each.detach().to(dtype) for each in (weights, bias)
        )
        of_states = None
        if needed[0]:  # given logits are overwritten by their gradient
            of_states = states if weights is None else torch.empty_like(states)
        of_weights = torch.zeros_like(weights) if needed[1] else None
        of_bias = torch.zeros_like(bias) if needed[2] else None
        totals = states.new_zeros(3, dtype=torch.float32)
        size = max(1, positions_at_once(len(states)))
        with torch.autocast(kind, enabled=False):
            for start in range(0, len(states), size):
                part = slice(start, start + size)
                theirs = None if teacher is None else teacher[part]
                if theirs is not None and terms.teacher_layer:
                    theirs = terms.teacher_layer.logits(theirs)
                inputs = states[part].to(dtype)
                logits = inputs if matrix is None else linear(inputs, matrix, offset)
                totals = totals + _evaluate(
                    logits, labels[part], theirs, terms, differentiable=any(needed)
                )
                if matrix is None:
                    continue
                if of_states is not None:
                    of_states[part] = logits @ matrix
                if of_weights is not None:
                    if of_weights.dtype == dtype:
                        of_weights.addmm_(logits.T, inputs)
                    else:
                        of_weights += logits.T @ inputs
                if of_bias is not None:
                    of_bias += logits.sum(0, dtype=of_bias.dtype)
                del theirs, logits, inputs  # before the next ones are made
        ctx.save_for_backward(of_states, of_weights, of_bias)
        found: tuple[Tensor, ...] = totals.unbind()
        ctx.mark_non_differentiable(*found[1:])
        return found

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, scale: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.saved_tensors
        for gradient in gradients:
            for rows in () if gradient is None else gradient.split(_rows_at_once(gradient)):
                # rounding the scale to the gradient's dtype would put the same error into all
                # numbers
                rows.copy_(rows.to(scale.dtype) * scale)
        return *gradients, None, None, None


def _evaluate(
    logits: Tensor, labels: Tensor, teacher: Tensor | None, terms: _Terms, *, differentiable: bool
) -> Tensor:
    """The sums of the weighted losses, the cross-entropies and the divergences of positions, [3].

    Args:
        logits: [n, V], before they are capped; overwritten by the gradient of the weighted sum if
            it is `differentiable`.
        labels: [n].
        teacher: [n, V'], logits.
        terms: of the loss.
        differentiable: whether a gradient is asked for.
    """
    totals = logits.new_zeros(3, dtype=torch.float32)
    size = _rows_at_once(logits)
    for start in range(0, len(logits), size):
        part = slice(start, start + size)
        rows = logits[part]
        wanted = labels[part]
        ours = capped(rows, terms.cap)
        found = _compare(ours, wanted, None if teacher is None else teacher[part])
        log_z = torch.zeros_like(found.lm)
        if terms.z_loss:
            log_z = (ours.amax(-1) - found.all.amax(-1)).masked_fill_(wanted == IGNORED, 0.0)
        total = terms.weight * found.kl + terms.z_loss * log_z.square()
        if terms.weight < 1:  # the cross-entropy of a token without probability is infinite
            total = total + (1 - terms.weight) * found.lm
        totals = totals + torch.stack([total.sum(), found.lm.sum(), found.kl.sum()])
        if differentiable:
            slope = _gradient(found, wanted, terms, log_z)
            rows.copy_(slope if terms.cap is None else slope.mul_(1 - (ours / terms.cap).square_()))
    return totals


def _gradient(found: _Compared, labels: Tensor, terms: _Terms, log_z: Tensor) -> Tensor:
    """The gradient of the weighted loss with respect to the logits, [n, V]: what is predicted less
    what is wanted. It is 0 for a student that is its teacher.

    Args:
        found: the predictions.
        labels: [n].
        terms: of the loss.
        log_z: [n], the logarithms of the sums of exponentials.
    """
    lm_weight = 1 - terms.weight
    slope = found.all.exp().mul_((lm_weight + 2 * terms.z_loss * log_z)[:, None])
    slope.scatter_add_(1, labels.clamp(min=0)[:, None], slope.new_full((len(slope), 1), -lm_weight))
    if found.teacher is not None:
        difference = found.shared.exp().sub_(found.teacher.exp_())
        slope[:, : difference.shape[1]].add_(difference, alpha=terms.weight)
    return slope.masked_fill_((labels == IGNORED)[:, None], 0.0)


def _rows_at_once(numbers: Tensor) -> int:
    """The number of rows in a chunk, of logits [n, V] or of gradients [n, d] and [n]."""
    size = CHUNK * torch.get_num_threads() if numbers.is_cpu else CHUNK_ON_ACCELERATOR
    return max(1, size // int(numbers.shape[1:].numel()))
