"""Weights of a projection that repeat rows, multiplied without the repetitions.

A merged head stands in the source's module once for each head that it replaces. A product with its repeated rows would
cost as many times more, forwards and backwards, so that outputs are repeated in place of rows.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


class RepeatedRows:
    """A weight whose rows are those of a smaller one: `functional.linear` multiplies by the smaller one and repeats the
    result. Whatever else is done with it is done with the whole weight.

    Args:
        rows: [n, d], with gradients if they are wanted.
        index: [m], the row that stands in each place.
        blocks: how many blocks of rows there are, if each is repeated as a whole, equally often; None if not. Outputs are
            then copied block by block, which takes a fraction of the time.
    """

    def __init__(self, rows: Tensor, index: Tensor, blocks: int | None = None) -> None:
        self.rows, self.index, self.blocks = rows, index, blocks
        self.shape, self.dtype, self.device = torch.Size((len(index), *rows.shape[1:])), rows.dtype, rows.device

    def whole(self) -> Tensor:
        """[m, d]"""
        return self.rows.index_select(0, self.index)

    def _repeated(self, made: Tensor) -> Tensor:
        """Outputs [..., n] as [..., m]."""
        if self.blocks is None:
            return made.index_select(-1, self.index)
        once = made.unflatten(-1, (self.blocks, 1, -1))
        return once.expand(*once.shape[:-2], len(self.index) // made.shape[-1], -1).flatten(-3)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole(), name)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func is functional.linear and len(args) > 1 and isinstance(args[1], cls):
            states, weight = args[:2]
            bias = args[2] if len(args) > 2 else options.get("bias")
            made = weight._repeated(functional.linear(states, weight.rows))
            return made if bias is None else made.add_(bias.to(made.dtype))
        return func(*map(_whole, args), **{name: _whole(each) for name, each in options.items()})


def _whole(value: Any) -> Any:
    return value.whole() if isinstance(value, RepeatedRows) else value
