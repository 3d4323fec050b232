"""The optimizer of the gradient stages: Adam with steps relative to the size of what is trained,
over a schedule of its own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gqa_convert.processes import count, rank, total
from gqa_convert.sharding import is_shard, placed_like, whole

_BETAS = (0.9, 0.95)
_WARM_UP = 10
_END = 0.05
_MOMENTS = {" mean": "exp_avg", " square": "exp_avg_sq"}
"""What the saved state calls Adam's moments of a tensor, behind the tensor's name."""

Array = npt.NDArray[np.float32]


class RelativeAdam:
    """Trains the tensors of merged layers.

    Args:
        layers: weights and biases of each layer to start from, in float32; these tensors themselves
            are trained. Processes may hold shards of them.
        rate: step size at its height, relative to the root mean square of each tensor; a bias
            counts as at least its weight.
        steps: that will be taken: ten to warm up, and a line down to a twentieth of the rate.
    """

    def __init__(self, layers: Sequence[Mapping[str, Tensor]], rate: float, steps: int) -> None:
        self._named: dict[str, Tensor] = {}
        self._rates: list[float] = []
        for number, tensors in enumerate(layers):
            sizes = {name: _root_mean_square(tensor) for name, tensor in tensors.items()}
            for name, tensor in tensors.items():
                weight = name.removesuffix(".bias") + ".weight"
                self._named[f"{number} {name}"] = tensor.requires_grad_()
                self._rates.append(rate * max(sizes[name], sizes.get(weight, 0.0)))
        groups = [{"params": [tensor]} for tensor in self._named.values()]
        self._adam = torch.optim.Adam(groups, betas=_BETAS, fused=True)
        self._steps, self._taken = steps, 0

    def step(self) -> None:
        """One step down the gradients that the backward passes of all processes have summed since
        the last step.
        """
        warm = min(1.0, (self._taken + 1) / _WARM_UP)
        share = warm * (1 - (1 - _END) * self._taken / self._steps)
        for group, rate in zip(self._adam.param_groups, self._rates, strict=True):
            group["lr"] = rate * share
        for tensor in self._named.values():
            # FSDP2 has summed the gradients of shards
            if count() > 1 and not is_shard(tensor):
                own = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                # the fused optimizer takes the strides of a gradient to be the tensor's
                tensor.grad = torch.empty_like(tensor).copy_(total(own))
        self._adam.step()
        self._taken += 1
        self._adam.zero_grad()

    def state(self) -> dict[str, Array]:
        """What the steps so far have come to: each tensor with its moments, whole, by names of its
        own. Every process calls this, and only the first one gets it.
        """
        found = {}
        for key, tensor in self._state():
            array = whole(tensor.detach())
            if rank() == 0:
                found[key] = array.cpu().numpy()
        return found

    def restore(self, read: Callable[[str], Array], taken: int) -> None:
        """Go on from a state.

        Args:
            read: what `state` returned, by its names.
            taken: the steps that it had taken, at least one.
        """
        self._taken = taken
        for tensor in self._named.values():
            moments = {moment: torch.zeros_like(tensor) for moment in _MOMENTS.values()}
            step = torch.tensor(float(taken), device=tensor.device)
            self._adam.state[tensor] = moments | {"step": step}
        with torch.no_grad():
            for key, tensor in self._state():
                tensor.copy_(placed_like(torch.from_numpy(read(key)), tensor))

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._named.items():
            yield name, tensor
            for ending, moment in _MOMENTS.items():
                yield name + ending, self._adam.state[tensor][moment]


def _root_mean_square(tensor: Tensor) -> float:
    return float(whole(tensor.detach()).double().square().mean().sqrt())


def batch_order(count: int, steps: int, seed: int) -> list[int]:
    """Which batch each step sees: every batch once before any twice."""
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    while len(order) < steps:
        order += torch.randperm(count, generator=generator).tolist()
    return order[:steps]
