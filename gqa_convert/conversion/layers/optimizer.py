"""The optimizer of the gradient stages: Adam with steps relative to the size of what is trained, over a schedule of its
own.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gqa_convert.processes import count, total

_BETAS = (0.9, 0.95)
_WARM_UP = 10
_END = 0.05


class RelativeAdam:
    """Trains the tensors of merged layers.

    Args:
        layers: weights and biases of each layer to start from, in float32; these tensors themselves are trained.
        rate: step size at its height, relative to the root mean square of each tensor; a bias counts as at least its
            weight.
        steps: that will be taken: ten to warm up, and a line down to a twentieth of the rate.

    Attributes:
        layers: what is trained, layer by layer, with gradients.
    """

    def __init__(self, layers: Sequence[Mapping[str, Tensor]], rate: float, steps: int) -> None:
        self.layers: list[dict[str, Tensor]] = []
        groups: list[dict[str, Any]] = []
        for tensors in layers:
            sizes = {
                name: float(start.double().square().mean().sqrt())
                for name, start in tensors.items()
            }
            trained = {name: start.detach().requires_grad_() for name, start in tensors.items()}
            for name, tensor in trained.items():
                weight = name.removesuffix(".bias") + ".weight"
                groups.append(
                    {"params": [tensor], "lr": rate * max(sizes[name], sizes.get(weight, 0.0))}
                )
            self.layers.append(trained)

        self._adam = torch.optim.Adam(groups, betas=_BETAS, fused=True)
        self._rates = [group["lr"] for group in groups]
        self._steps, self._taken = steps, 0

    def step(self) -> None:
        """One step down the gradients that the backward passes of all processes have summed since the last step."""
        share = min(1.0, (self._taken + 1) / _WARM_UP) * (
            1 - (1 - _END) * self._taken / self._steps
        )
        for group, rate in zip(self._adam.param_groups, self._rates, strict=True):
            group["lr"] = rate * share
        if count() > 1:
            for _, tensor in self._named():
                if tensor.grad is None:
                    tensor.grad = torch.zeros_like(tensor)
                tensor.grad.copy_(
                    total(tensor.grad)
                )  # whose strides the fused optimizer takes to be the tensor's
        self._adam.step()
        self._taken += 1
        self._adam.zero_grad()

    def state(self) -> dict[str, Tensor]:
        """What the steps so far have come to, by names of its own: each tensor with its moments."""
        found: dict[str, Tensor] = {}
        for name, tensor in self._named():
            own = self._adam.state[tensor]
            found |= {
                name: tensor.detach(),
                f"{name} mean": own["exp_avg"],
                f"{name} square": own["exp_avg_sq"],
            }
        return found

    def restore(self, state: Mapping[str, Tensor], taken: int) -> None:
        """Go on from a state.

        Args:
            state: what `state` returned.
            taken: the steps that it had taken, at least one.
        """
        self._taken = taken
        for name, tensor in self._named():
            tensor.data.copy_(state[name])
            moments = {"exp_avg": state[f"{name} mean"], "exp_avg_sq": state[f"{name} square"]}
            self._adam.state[tensor] = {
                key: moment.to(tensor.device) for key, moment in moments.items()
            }
            self._adam.state[tensor]["step"] = torch.tensor(float(taken), device=tensor.device)

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        for number, tensors in enumerate(self.layers):
            for name, tensor in tensors.items():
                yield f"{number} {name}", tensor

    def results(self) -> list[dict[str, Tensor]]:
        """What was trained, layer by layer, without gradients."""
        return [
            {name: tensor.detach() for name, tensor in tensors.items()} for tensors in self.layers
        ]


def batch_order(count: int, steps: int, seed: int) -> list[int]:
    """Which batch each step sees: every batch once before any twice."""
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    while len(order) < steps:
        order += torch.randperm(count, generator=generator).tolist()
    return order[:steps]
