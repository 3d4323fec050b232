"""The optimizer of the gradient stages: Adam with steps relative to the size of what is trained, over a schedule of its
own.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gqa_convert.conversion.fit.head_parameters import BIASES, Parts

_BETAS = (0.9, 0.95)
_WARM_UP = 10
_END = 0.05


class RelativeAdam:
    """Trains merged heads.

    Args:
        layers: parts of each layer to start from; they are not changed.
        rate: step size at its height, relative to the root mean square of each tensor; a bias counts as at least what
            it belongs to.
        steps: that will be taken: ten to warm up, and a line down to a twentieth of the rate.
    """

    def __init__(self, layers: Sequence[Parts], rate: float, steps: int) -> None:
        self._steps, self._taken = steps, 0
        self._layers: list[dict[str, Tensor]] = []
        groups = []
        for parts in layers:
            trained = {name: start.detach().clone().requires_grad_() for name, start in parts.items()}
            scales = {name: float(start.double().square().mean().sqrt()) for name, start in parts.items()}
            for field, bias in BIASES.items():
                if bias in parts:
                    scales[bias] = max(scales[bias], scales[field])
            for name, weight in trained.items():
                groups.append({"params": [weight], "height": rate * scales[name]})
            self._layers.append(trained)
        self._adam = torch.optim.Adam(groups, betas=_BETAS, fused=True)

    def parts(self) -> list[dict[str, Tensor]]:
        """What is trained, layer by layer, with gradients."""
        return self._layers

    def step(self) -> None:
        """One step down the gradients that backward passes have summed since the last step."""
        decayed = 1 - (1 - _END) * self._taken / self._steps
        self._taken += 1
        share = min(1.0, self._taken / _WARM_UP) * decayed
        for group in self._adam.param_groups:
            group["lr"] = group["height"] * share
        self._adam.step()
        self._adam.zero_grad()

    def results(self) -> list[dict[str, Tensor]]:
        """What was trained, layer by layer, without gradients."""
        return [{name: tensor.detach() for name, tensor in parts.items()} for parts in self._layers]


def batch_order(count: int, steps: int, seed: int) -> list[int]:
    """Which batch each step sees: every batch once before any twice."""
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    while len(order) < steps:
        order += torch.randperm(count, generator=generator).tolist()
    return order[:steps]
