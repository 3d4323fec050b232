"""Adafactor, on whole parameters and on the shards of FSDP2."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

LEAST_FACTORED = 128
"""Matrices with a shorter side are not factored."""


class Adafactor(torch.optim.Optimizer):  # type: ignore[misc]  # torch is not followed
    """Adafactor (Shazeer & Stern 2018) in T5's configuration: the learning rate is scaled by each parameter's rms, and
    there is no first moment.

    For a parameter w with gradient g at step t, where rms(x) is the root mean square of x's elements:

        decay = 1 - t^-0.8
        v     = decay * v + (1 - decay) * (g^2 + 1e-30)
        u     = g / sqrt(v)
        w     = w - lr * max(1e-3, rms(w)) * u / max(1, rms(u) / clipping)

    Of a matrix's v, only the row means r and the column means c are kept, and v = r c / mean(r).

    transformers' Adafactor with `scale_parameter=True, relative_step=False` computes the same; torch's bounds v
    differently and caps the rate at 1 / sqrt(t). Neither takes parameters that FSDP2 has sharded by rows, as this one
    does. Like T5's own code, it does not factor matrices with a side below 128.

    Args:
        params: parameters or groups of them.
        lr: the learning rate before scaling. T5 used 1e-3 in fine-tuning and at the millionth step of pretraining.
        clipping: the largest rms of an update before scaling.
        weight_decay: decoupled weight decay, multiplied by the same scaled rate; T5 used none.
    """

    def __init__(self, params: Any, lr: float = 1e-3, clipping: float = 1.0, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "clipping": clipping, "weight_decay": weight_decay})

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: None = None) -> None:
        """Update every parameter that has a gradient. `closure`, which torch passes by name, is not used."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        shape, part = parameter.shape, _local(parameter)
        gradient, weight = _local(parameter.grad).float(), part.float()
        square = gradient.square() + 1e-30
        factored = parameter.ndim >= 2 and min(shape[-2:]) >= LEAST_FACTORED
        by_rows = isinstance(parameter, DTensor) and parameter.ndim == 2  # then column means need all processes

        def mean_of_rows(numbers: Tensor) -> Tensor:
            sums = numbers.sum(-2, keepdim=True)
            return (_total(sums, parameter) if by_rows else sums) / shape[-2]

        def rms(numbers: Tensor) -> Tensor:
            return (_total(numbers.square().sum(), parameter) / parameter.numel()).sqrt()

        means = {"squares": square}
        if factored:
            means = {"rows": square.sum(-1, keepdim=True) / shape[-1], "columns": mean_of_rows(square)}
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for name, mean in means.items():
                state[name] = _moment(torch.zeros_like(mean), parameter, replicated=by_rows and name == "columns")
        state["step"] += 1
        new_share = float(float(state["step"]) ** -0.8)
        moments = {
            name: _local(state[name]).mul_(1 - new_share).add_(mean, alpha=new_share) for name, mean in means.items()
        }
        if factored:
            rows, columns = moments["rows"], moments["columns"]
            update = gradient * (rows / mean_of_rows(rows)).rsqrt() * columns.rsqrt()
        else:
            update = gradient * moments["squares"].rsqrt()
        scale = group["lr"] * rms(weight).clamp(min=1e-3)
        update = update * (scale / (rms(update) / group["clipping"]).clamp(min=1.0))
        if group["weight_decay"]:
            update = update + weight * (scale * group["weight_decay"])
        part.copy_(weight - update)


def _local(tensor: Any) -> Tensor:
    """The part of a tensor that this process holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _total(sums: Tensor, parameter: Tensor) -> Tensor:
    """Sums over all elements of a parameter, from those over this process's part of it. These small collectives, four
    for a matrix, stay far below a step's time.
    """
    if isinstance(parameter, DTensor):
        torch.distributed.all_reduce(sums, group=parameter.device_mesh.get_group())
    return sums


def _moment(zeros: Tensor, parameter: Tensor, *, replicated: bool) -> Tensor:
    """A moment, sharded like its parameter or replicated, so that any number of processes can load it."""
    if not isinstance(parameter, DTensor):
        return zeros
    shape = zeros.shape if replicated else torch.Size((parameter.shape[0], *zeros.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    placement = Replicate() if replicated else Shard(0)
    return DTensor.from_local(zeros, parameter.device_mesh, [placement], run_check=False, shape=shape, stride=stride)
