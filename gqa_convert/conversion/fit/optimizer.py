"""The optimizer of the gradient stages: Adam with steps relative to the size of what is trained, over a schedule of its
own.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

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
        groups = []
        for tensors in layers:
            sizes = {name: float(start.double().square().mean().sqrt()) for name, start in tensors.items()}
            trained = {name: start.detach().requires_grad_() for name, start in tensors.items()}
            for name, tensor in trained.items():
                weight = name.removesuffix(".bias") + ".weight"
                groups.append({"params": [tensor], "lr": rate * max(sizes[name], sizes.get(weight, 0.0))})
            self.layers.append(trained)

        def share(taken: int) -> float:
            return min(1.0, (taken + 1) / _WARM_UP) * (1 - (1 - _END) * taken / steps)

        self._adam = torch.optim.Adam(groups, betas=_BETAS, fused=True)
        self._schedule = LambdaLR(self._adam, share)

    def step(self) -> None:
        """One step down the gradients that backward passes have summed since the last step."""
        self._adam.step()
        self._schedule.step()
        self._adam.zero_grad()

    def results(self) -> list[dict[str, Tensor]]:
        """What was trained, layer by layer, without gradients."""
        return [{name: tensor.detach() for name, tensor in tensors.items()} for tensors in self.layers]


def batch_order(count: int, steps: int, seed: int) -> list[int]:
    """Which batch each step sees: every batch once before any twice."""
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    while len(order) < steps:
        order += torch.randperm(count, generator=generator).tolist()
    return order[:steps]
