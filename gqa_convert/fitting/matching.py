"""A short gradient stage for one layer: its merged projections learn to yield what the source's attention yields.

Layers do not depend on one another here, nothing but the layer is in memory, and the text is the calibration text.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gqa_convert.calibration.site import Call
from gqa_convert.fitting.assembly import BIASES, Parts

STEPS = 400
RATE = 0.05
"""Step size of Adam at its height, relative to the root mean square of what is trained."""
_BETAS = (0.9, 0.99)
_WARM_UP = 10
_END = 0.05


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
    scale = {name: _rms(tensor) for name, tensor in parts.items()}
    scale |= {bias: max(scale[bias], scale[role]) for role, bias in BIASES.items()}
    trained = {name: tensor.detach().clone().requires_grad_() for name, tensor in parts.items()}
    groups = [{"params": [tensor], "lr": RATE * scale[name], "height": RATE * scale[name]} for name, tensor in trained.items()]
    optimizer = torch.optim.Adam(groups, betas=_BETAS, fused=True)
    size = sum(float(target.double().square().sum()) for target in targets) / sum(target.numel() for target in targets)
    order = _order(len(calls), steps, seed)

    for step, number in enumerate(order):
        share = min(1.0, (step + 1) / _WARM_UP) * (_END + (1 - _END) * 0.5 * (1 + math.cos(math.pi * step / steps)))
        for group in optimizer.param_groups:
            group["lr"] = group["height"] * share
        call = calls[number]
        with torch.enable_grad():
            error = (run(call, trained) - targets[number]).square().sum(-1)
            loss = (error if call.counted is None else error[call.counted]).mean() / (size * targets[number].shape[-1] or 1.0)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    return {name: tensor.detach() for name, tensor in trained.items()}


def _order(count: int, steps: int, seed: int) -> list[int]:
    """Every batch once before any twice."""
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    while len(order) < steps:
        order += torch.randperm(count, generator=generator).tolist()
    return order[:steps]


def _rms(tensor: Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())
