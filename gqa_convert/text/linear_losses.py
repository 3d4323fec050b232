"""Losses from the input of an output layer, whose logits are never held as a whole."""

from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gqa_convert.text.loss_terms import (
    CombinedLoss,
    Found,
    Terms,
    check_options,
    check_shapes,
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


def linear_loss(
    states: Tensor,
    layer: OutputLayer,
    labels: Tensor,
    teacher: Tensor | None = None,
    teacher_layer: OutputLayer | None = None,
    *,
    weight: float = 0.0,
    temperature: float = 1.0,
    top_k: int | None = None,
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
        weight: see `combined_loss`, like the other options.
        temperature: see there.
        top_k: see there.
        z_loss: see there.

    Raises:
        OptionError: an option is out of range, or the shapes do not match.
    """
    check_options(weight, temperature, top_k)
    teacher = weighted(teacher, weight)
    check_shapes(states, labels, teacher, temperature)
    terms = Terms(weight, temperature, top_k, z_loss)
    found = _LinearLoss.apply(
        states, layer.weight, layer.bias, layer.cap, labels, teacher, teacher_layer, terms, torch.is_grad_enabled()
    )
    return combined(found, labels, terms)


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
        teacher: Tensor | None,
        teacher_layer: OutputLayer | None,
        terms: Terms,
        differentiable: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        kind = states.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weights.dtype
        flat, labels_flat = states.detach().reshape(-1, states.shape[-1]), labels.reshape(-1)
        theirs = None if teacher is None else teacher.detach().reshape(-1, teacher.shape[-1])
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
                found.append(evaluate(logits, labels_flat[part], other, terms, logits if any(needed) else None))
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
        ctx.save_for_backward(None if of_states is None else of_states.view(states.shape), of_weights, of_bias)
        parts = Found(*(torch.cat(each) for each in zip(*found, strict=True)))
        totals = parts.totals(labels.shape, terms)
        ctx.mark_non_differentiable(*totals[1:])
        return totals

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, scale: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        scaled = (None if each is None else scale_into(each, scale, each) for each in ctx.saved_tensors)
        return *scaled, *[None] * 6
