"""Projections that are trained as they are, or as themselves plus a product of two small matrices."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

PROJECTIONS = ("queries", "outputs")
"""The parts of a layer of which a merge leaves as many heads as there were."""


class Trained(ABC):
    """A part of a layer while it is trained."""

    @property
    @abstractmethod
    def weights(self) -> tuple[Tensor, ...]:
        """Leaves that take gradients."""

    @abstractmethod
    def scales(self, own: float) -> tuple[float, ...]:
        """The size to which steps of each of `weights` are relative.

        Args:
            own: the root mean square of the part.
        """

    @abstractmethod
    def value(self) -> Tensor:
        """The part, with gradients to `weights`."""


class Whole(Trained):
    """A copy of the part.

    Args:
        start: it is not changed.
    """

    def __init__(self, start: Tensor) -> None:
        self.weight = start.detach().clone().requires_grad_()

    @property
    def weights(self) -> tuple[Tensor, ...]:
        return (self.weight,)

    def scales(self, own: float) -> tuple[float, ...]:
        return (own,)

    def value(self) -> Tensor:
        return self.weight


class LowRank(Trained):
    """The part plus a change of low rank (LoRA, Hu et al. 2021, section 4.1), zero in the beginning.

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
        self._scale = rank**-0.5
        self.down = first.to(start).requires_grad_()
        self.up = start.new_zeros(rows, rank).requires_grad_()

    @property
    def weights(self) -> tuple[Tensor, ...]:
        return self.down, self.up

    def scales(self, own: float) -> tuple[float, ...]:
        return self._scale, own

    def value(self) -> Tensor:
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


def trained(start: Tensor, role: str, rank: int, generator: torch.Generator) -> Trained:
    """A part of a layer, with a change of low rank where that has fewer numbers.

    Args:
        start: what training starts from; it is not changed.
        role: its field of `Heads`.
        rank: of the change; 0 to train the part as it is.
        generator: of the first values of a change.
    """
    if role in PROJECTIONS and rank:
        rows = start.shape[-2] if role == "outputs" else start.shape[:-1].numel()
        if rank * (rows + start.numel() // rows) < start.numel():
            return LowRank(start, role, rank, generator)
    return Whole(start)
