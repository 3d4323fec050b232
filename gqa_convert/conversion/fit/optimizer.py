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
_PROJECTIONS = ("queries", "outputs")
"""The parts of a layer of which a merge leaves as many heads as there were."""


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
        self._steps, self._taken = steps, 0
        self._layers: list[dict[str, Tensor | LowRankChange]] = []
        generator = torch.Generator().manual_seed(0)
        groups = []
        for parts in layers:
            trained: dict[str, Tensor | LowRankChange] = {}
            for name, start in parts.items():
                height = rate * _scale(parts, name)
                if rank and name in _PROJECTIONS:
                    change = LowRankChange(start, name, rank, generator)
                    trained[name] = change
                    groups.append({"params": [change.down], "height": rate * rank**-0.5})
                    groups.append({"params": [change.up], "height": height})
                else:
                    weight = start.detach().clone().requires_grad_()
                    trained[name] = weight
                    groups.append({"params": [weight], "height": height})
            self._layers.append(trained)
        self._adam = torch.optim.Adam(groups, betas=_BETAS, fused=True)

    def parts(self) -> list[dict[str, Tensor]]:
        """What is trained, layer by layer, with gradients; for one backward pass."""
        return [{name: _value(part) for name, part in trained.items()} for trained in self._layers]

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
        with torch.no_grad():
            return [{name: tensor.detach() for name, tensor in parts.items()} for parts in self.parts()]


class LowRankChange:
    """A projection plus a change of low rank (LoRA, Hu et al. 2021, section 4.1), zero in the beginning.

    Args:
        start: queries or outputs of `Heads`; it is not changed, and stays referenced.
        role: which of the two.
        rank: of the change.
        generator: of the first values.
    """

    def __init__(self, start: Tensor, role: str, rank: int, generator: torch.Generator) -> None:
        self._start, self._is_output = start.detach(), role == "outputs"
        rows, columns = self._matrix().shape
        # with the root of its rank, a step of `up` changes the product's numbers by about its own size
        first = torch.randn(rank, columns, generator=generator) / rank**0.5
        self.down = first.to(start).requires_grad_()
        self.up = start.new_zeros(rows, rank).requires_grad_()

    def value(self) -> Tensor:
        """The sum, with gradients to `down` and `up`."""
        with torch.autocast(self._start.device.type, enabled=False):  # the sum keeps the precision of the weights
            changed = torch.addmm(self._matrix(), self.up, self.down)
        if not self._is_output:
            return changed.view(self._start.shape)
        heads, ratio, _, head_dim = self._start.shape
        return changed.unflatten(1, (heads, ratio, head_dim)).permute(1, 2, 0, 3)

    def _matrix(self) -> Tensor:
        """The projection [rows, inputs], as its module has it."""
        if self._is_output:
            return self._start.permute(2, 0, 1, 3).flatten(1)
        return self._start.flatten(0, -2)


def _value(part: Tensor | LowRankChange) -> Tensor:
    return part if isinstance(part, Tensor) else part.value()


def batch_order(count: int, steps: int, seed: int) -> list[int]:
    """Which batch each step sees: every batch once before any twice."""
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    while len(order) < steps:
        order += torch.randperm(count, generator=generator).tolist()
    return order[:steps]


def _scale(parts: Parts, name: str) -> float:
    """What steps of a part are relative to."""
    own = _root_mean_square(parts[name])
    for role, bias in BIASES.items():
        if name == bias:
            return max(own, _root_mean_square(parts[role]))
    return own


def _root_mean_square(tensor: Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())
