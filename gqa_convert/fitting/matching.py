"""A short gradient stage for one layer: its merged projections learn to yield what the source's attention yields.

Layers do not depend on one another here, nothing but the layer is in memory, and the text is the calibration text.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gqa_convert.calibration.site import Call
from gqa_convert.fitting.assembly import Parts

STEPS = 200
RATE = 0.025
"""Step size of Adam at its height, relative to the root mean square of what is trained."""
_BETAS = (0.9, 0.99)
_WARM_UP = 10
_END = 0.05
_BIASED = ("queries", "keys", "values")
"""Roles whose last column is a bias."""


def match(
    parts: Parts, run: Callable[[Call, Parts], Tensor], calls: Sequence[Call], targets: Sequence[Tensor], *, steps: int, seed: int
) -> dict[str, Tensor]:  # fmt: skip
    """Adam on the squared error of attention's output.

    Args:
        parts: merged heads to start from.
        run: attention's output for a call, with gradients to the parts.
        calls: the student's, one batch each.
        targets: what each is to yield, [B, L, D].
        steps: batches to see.
        seed: of their order.

    Returns:
        Trained parts; those given are not changed.
    """
    weights = {role: tensor[..., :-1] if role in _BIASED else tensor for role, tensor in parts.items()}
    biases = {f"{role} bias": tensor[..., -1:] for role, tensor in parts.items() if role in _BIASED}
    scale = {name: _rms(tensor) for name, tensor in weights.items()}
    scale |= {name: max(_rms(tensor), scale[name.removesuffix(" bias")]) for name, tensor in biases.items()}
    trained = {name: tensor.detach().clone().requires_grad_() for name, tensor in (weights | biases).items()}
    groups = [{"params": [tensor], "lr": RATE * scale[name], "height": RATE * scale[name]} for name, tensor in trained.items()]
    optimizer = torch.optim.Adam(groups, betas=_BETAS)
    size = sum(float(target.double().square().sum()) for target in targets) / sum(target.numel() for target in targets)
    order = _order(len(calls), steps, seed)

    def assembled() -> dict[str, Tensor]:
        return {role: torch.cat([trained[role], trained[f"{role} bias"]], dim=-1) if role in _BIASED else trained[role] for role in parts}

    for step, number in enumerate(order):
        share = min(1.0, (step + 1) / _WARM_UP) * (_END + (1 - _END) * 0.5 * (1 + math.cos(math.pi * step / steps)))
        for group in optimizer.param_groups:
            group["lr"] = group["height"] * share
        call = calls[number]
        with torch.enable_grad():
            error = (run(call, assembled()) - targets[number]).square().sum(-1)
            loss = (error if call.counted is None else error[call.counted]).mean() / (size * targets[number].shape[-1] or 1.0)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    with torch.no_grad():
        return {role: tensor.detach() for role, tensor in assembled().items()}


def _order(count: int, steps: int, seed: int) -> list[int]:
    """Every batch once before any twice."""
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    while len(order) < steps:
        order += torch.randperm(count, generator=generator).tolist()
    return order[:steps]


def _rms(tensor: Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())
