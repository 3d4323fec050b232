"""Losses from the input of an output layer, whose logits are never held as a whole."""

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gqa_convert.data.labels import IGNORED
from gqa_convert.text.loss_terms import (
    CombinedLoss,
    Found,
    Terms,
    check_shapes,
    check_weight,
    combined,
    evaluate,
    scale_into,
    weighted,
)
from gqa_convert.text.output_layers import OutputLayer, capped

_POSITIONS: Final = 1024
_PARTS: Final = 8
"""Positions whose logits are made at a time, and into how many parts a batch is divided at most: with more of them,
reading the layer and adding to its gradient would take longer than the products.
"""
_MOST_LABELLED: Final = 0.9


def linear_loss(
    states: Tensor,
    layer: OutputLayer,
    labels: Tensor,
    teacher: Tensor | None = None,
    teacher_layer: OutputLayer | None = None,
    *,
    labelled: Tensor | None = None,
    weight: float = 0.0,
    z_loss: float = 0.0,
) -> CombinedLoss:
    """Compute what `losses.combined_loss` does, from the input of the output layer.

    The logits of student and teacher are made for `positions_at_once` positions at a time, and the gradients with respect
    to the states and the layer in the same pass, as in Liger (Hsu et al. 2024, section 3.2) and for the divergence as
    well. Only one backward pass is possible. Products are computed in the dtype of the layer, or that of autocasting; the
    layer's gradient has the layer's dtype.

    Args:
        states: [b, L, d], the input of the student's output layer.
        layer: the student's output layer.
        labels: see `combined_loss`.
        teacher: [b, L, d'], the input of the teacher's output layer, or [b, L, V'], the teacher's logits.
        teacher_layer: the teacher's output layer; None if `teacher` contains logits.
        labelled: [k], the positions of b * L whose logits are needed, as `labelled_positions` finds them; by default all.
        weight: see `combined_loss`.
        z_loss: see there.

    Raises:
        OptionError: an option is out of range, or the shapes do not match.
    """
    check_weight(weight)
    teacher = weighted(teacher, weight)
    check_shapes(states, labels, teacher)
    terms = Terms(weight, z_loss)
    found = _LinearLoss.apply(
        states,
        layer.weight,
        layer.bias,
        layer.cap,
        labels,
        labelled,
        teacher,
        teacher_layer,
        terms,
        torch.is_grad_enabled(),
    )
    return combined(found, labels, terms)


def labelled_positions(labels: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
    """The positions that have a label, at least one; None if nearly all have, so that leaving out the others gains nothing.

    Args:
        labels: [b, L], with -100 at positions to ignore.
    """
    found = np.flatnonzero(labels != IGNORED)
    return None if len(found) > _MOST_LABELLED * labels.size else found if len(found) else np.zeros(1, np.int64)


def positions_at_once(positions: int) -> int:
    """The number of positions, of a batch, whose logits `linear_loss` holds together."""
    return min(positions, max(_POSITIONS, -(-positions // _PARTS)))


class _LinearLoss(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weights: Tensor,
        bias: Tensor | None,
        cap: float | None,
        labels: Tensor,
        labelled: Tensor | None,
        teacher: Tensor | None,
        teacher_layer: OutputLayer | None,
        terms: Terms,
        differentiable: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        kind = states.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weights.dtype
        flat = _rows(states, labelled)
        wanted = _rows(labels[..., None], labelled)
        theirs = None if teacher is None else _rows(teacher, labelled)
        needed = [differentiable and each for each in ctx.needs_input_grad[:3]]
        layer = OutputLayer(*(None if each is None else each.detach().to(dtype) for each in (weights, bias)))
        of_states = torch.empty_like(flat) if needed[0] else None
        of_weights, of_bias = (
            torch.zeros_like(each) if asked else None for each, asked in zip((weights, bias), needed[1:], strict=True)
        )
        found = []
        with torch.autocast(kind, enabled=False):
            step = positions_at_once(len(flat))
            for start in range(0, len(flat), step):
                part = slice(start, start + step)
                some = flat[part].to(dtype)
                logits = layer.logits(some)
                slope = None
                if cap is not None:
                    logits = capped(logits, cap)
                    slope = 1.0 - (logits / cap).square_() if any(needed) else None
                other = None if theirs is None else theirs[part]
                if other is not None and teacher_layer is not None:
                    other = teacher_layer.logits(other)
                found.append(evaluate(logits, wanted[part], other, terms, logits if any(needed) else None))
                gradient = logits if slope is None else logits.mul_(slope)
                if of_states is not None:
                    of_states[part] = gradient @ layer.weight
                if of_weights is not None:
                    if of_weights.dtype == dtype:
                        of_weights.addmm_(gradient.T, some)
                    else:
                        of_weights += gradient.T @ some
                if of_bias is not None:
                    of_bias += gradient.sum(0, dtype=of_bias.dtype)
        count = labels.numel()
        if of_states is not None:
            of_states = _placed(of_states, labelled, count).view(states.shape)
        ctx.save_for_backward(of_states, of_weights, of_bias)
        parts = Found(*(_placed(torch.cat(each), labelled, count) for each in zip(*found, strict=True)))
        totals = parts.totals(labels.shape, terms)
        ctx.mark_non_differentiable(*totals[1:])
        return totals

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, scale: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        scaled = (None if each is None else scale_into(each, scale, each) for each in ctx.saved_tensors)
        return *scaled, *[None] * 7


def _rows(tensor: Tensor, places: Tensor | None) -> Tensor:
    """The rows of a tensor [b, L, ...] at some places of b * L, or all of them."""
    flat = tensor.detach().flatten(0, 1)
    return flat if places is None else flat[places]


def _placed(rows: Tensor, places: Tensor | None, count: int) -> Tensor:
    """Rows at their places, among zeros."""
    if places is None:
        return rows
    return torch.zeros(count, *rows.shape[1:], dtype=rows.dtype, device=rows.device).index_copy_(0, places, rows)
