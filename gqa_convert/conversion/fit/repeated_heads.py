"""Weights of a projection that repeat heads, multiplied without the repetitions.

A merged head stands in the source's module once for each head that it replaces. A product with its repeated rows would
cost as many times more, forwards and backwards, so that outputs are repeated in place of rows. Where a text of 50 tokens
goes with 1,500 positions of sound, most of a gradient step is such products.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional


class RepeatedHeads:
    """A weight in which each head of a smaller one stands several times: `functional.linear` multiplies by the smaller
    one and repeats the result. Whatever else is done with it is done with the whole weight.

    Args:
        rows: [heads * head_dim, d], with gradients if they are wanted.
        heads: their number.
        times: that each stands behind itself.
    """

    def __init__(self, rows: Tensor, heads: int, times: int) -> None:
        self.rows, self._heads, self._times = rows, heads, times

    def whole(self) -> Tensor:
        """[heads * times * head_dim, d]"""
        return self._repeated(self.rows.T).T

    def _repeated(self, made: Tensor) -> Tensor:
        """Outputs [..., heads * head_dim] as [..., heads * times * head_dim]."""
        once = made.unflatten(-1, (self._heads, 1, -1))
        return once.expand(*once.shape[:-2], self._times, -1).flatten(-3)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole(), name)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is functional.linear and not kwargs:
            states, weight, *bias = args
            made = weight._repeated(functional.linear(states, weight.rows))
            return made if not bias or bias[0] is None else made + bias[0].to(made.dtype)
        return func(*map(_whole, args), **{name: _whole(each) for name, each in (kwargs or {}).items()})


def _whole(value: Any) -> Any:
    return value.whole() if isinstance(value, RepeatedHeads) else value
