"""Adafactor for parameters that may be sharded."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate


class Adafactor(torch.optim.Optimizer):  # type: ignore[misc]  # torch is not followed
    """Adafactor (Shazeer & Stern 2018) in T5's configuration: the learning rate is scaled by each
    parameter's rms, and there is no first moment.

    For a parameter w with gradient g at step t, where rms(x) is the root mean square of x's
    elements:

        decay = 1 - t^-0.8
        v     = decay * v + (1 - decay) * (g^2 + 1e-30)
        u     = g / sqrt(v)
        w     = w - lr * max(1e-3, rms(w)) * (u / max(1, rms(u)) + weight_decay * w)

    Of a matrix's v, only the row means r and the column means c are kept, and v = r c / mean(r).

    transformers' Adafactor with `scale_parameter=True, relative_step=False` computes the same, but
    fails on parameters that FSDP2 has sharded; so does torch's (2.13).

    Args:
        params: parameters or groups of them.
        lr: the learning rate before scaling. T5 used 1e-3 in fine-tuning and at the millionth step
            of pretraining.
        weight_decay: decoupled weight decay, multiplied by the same scaled rate; T5 used none.
    """

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: None = None) -> None:
        """Update every parameter that has a gradient. `closure`, which torch passes by name, is not
        used.
        """
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group["lr"], group["weight_decay"])

    def _update(self, parameter: Tensor, rate: float, weight_decay: float) -> None:
        square = parameter.grad.square() + 1e-30
        means = {"squares": square}
        if parameter.ndim >= 2:
            means = {"rows": _mean(square, -1), "columns": _mean(square, -2)}
        state = self.state[parameter]
        step = state.setdefault("step", torch.zeros(())).add_(1)
        new_share = float(step) ** -0.8
        for name, mean in means.items():
            known = state.setdefault(name, torch.zeros_like(mean))
            known.mul_(1 - new_share).add_(mean, alpha=new_share)
        if parameter.ndim >= 2:
            rows = state["rows"] / _mean(state["rows"], -2)
            update = parameter.grad * rows.rsqrt() * state["columns"].rsqrt()
        else:
            update = parameter.grad * state["squares"].rsqrt()
        scale = rate * _rms(parameter).clamp(min=1e-3)
        update = update * (scale / _rms(update).clamp(min=1.0)) + parameter * (scale * weight_decay)
        parameter.sub_(update)


def _mean(numbers: Tensor, dimension: int) -> Tensor:
    """The mean along a dimension, which is kept; on every process if it takes numbers of all."""
    return _summed(numbers.sum(dimension, keepdim=True)) / numbers.shape[dimension]


def _rms(numbers: Tensor) -> Tensor:
    return (_summed(numbers.square().sum()) / numbers.numel()).sqrt()


def _summed(sums: Tensor) -> Tensor:
    """The whole of sums that the processes have parts of. These small collectives, four for a
    matrix, stay far below a step's time.
    """
    if isinstance(sums, DTensor) and any(each.is_partial() for each in sums.placements):
        return sums.redistribute(placements=[Replicate()] * sums.device_mesh.ndim)
    return sums
