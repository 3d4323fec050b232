"""The optimizer of the gradient stages: Adam with steps relative to the size of what is trained, over a schedule of its
own.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from gqa_convert.conversion.fit.assembly import BIASES, Parts
from gqa_convert.conversion.fit.low_rank import Trained, trained

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
        rank: of the changes of queries and outputs; 0 trains these as they are.
    """

    def __init__(self, layers: Sequence[Parts], rate: float, steps: int, rank: int = 0) -> None:
        self._layers: list[dict[str, Trained]] = []
        self._steps, self._taken = steps, 0
        generator = torch.Generator().manual_seed(0)
        groups = []
        for parts in layers:
            scale = {name: _rms(tensor) for name, tensor in parts.items()}
            scale |= {bias: max(scale[bias], scale[role]) for role, bias in BIASES.items()}
            made = {name: trained(tensor, name, rank, generator) for name, tensor in parts.items()}
            for name, part in made.items():
                heights = (rate * each for each in part.scales(scale[name]))
                groups += [
                    {"params": [weight], "lr": height, "height": height}
                    for weight, height in zip(part.weights, heights, strict=True)
                ]
            self._layers.append(made)
        self._adam = torch.optim.Adam(groups, betas=_BETAS, fused=True)

    def parts(self) -> list[dict[str, Tensor]]:
        """What is trained, layer by layer, with gradients; for one backward pass."""
        return [{name: part.value() for name, part in parts.items()} for parts in self._layers]

    def step(self, losses: Iterable[Tensor]) -> None:
        """One step down the gradient of a sum of losses, each of which is made when the one before is done."""
        number = self._taken
        decayed = 1 - (1 - _END) * number / self._steps
        share = min(1.0, (number + 1) / _WARM_UP) * decayed
        for group in self._adam.param_groups:
            group["lr"] = group["height"] * share
        self._adam.zero_grad()
        for loss in losses:
            torch.autograd.backward(loss)
        self._adam.step()
        self._taken += 1

    def weights(self) -> Iterator[Tensor]:
        """The leaves of what is trained, which take gradients."""
        return (weight for parts in self._layers for part in parts.values() for weight in part.weights)

    def results(self) -> list[dict[str, Tensor]]:
        """What was trained, layer by layer, without gradients."""
        with torch.no_grad():
            return [{name: tensor.detach() for name, tensor in parts.items()} for parts in self.parts()]


def batch_order(count: int, steps: int, seed: int) -> list[int]:
    """Which batch each step sees: every batch once before any twice."""
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    while len(order) < steps:
        order += torch.randperm(count, generator=generator).tolist()
    return order[:steps]


def _rms(tensor: Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())
