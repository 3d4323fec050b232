"""Merges the heads of a group again, in torch."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Final

from gqa_convert.verify.numbers import wide_dtype

BLOCK: Final = 1 << 16
"""Numbers of a head that are widened at a time: as many as a core's cache holds."""


def _mean(heads: Iterable[Any]) -> Any:
    total, count = None, 0
    for head in heads:
        total = head.clone() if total is None else total.add_(head)
        count += 1
    assert total is not None
    return total / count


def _first(heads: Iterable[Any]) -> Any:
    return next(iter(heads))


MERGES: Final[Mapping[str, Callable[[Iterable[Any]], Any]]] = {"mean": _mean, "first": _first}
"""How a method makes one head of several, in the type that sums are kept in."""


def merge(heads: Iterable[Any], method: str, dtype: Any = None) -> Any:
    """The merged head of a group.

    Args:
        heads: tensors of one type and shape in head order; consumed one by one.
        method: a key of `MERGES`.
        dtype: to round to, by default the type of the heads.
    """
    left = iter(heads)
    first = next(left)
    wide = (head.to(wide_dtype(first.dtype)) for head in chain((first,), left))
    return MERGES[method](wide).to(dtype or first.dtype)


def merge_blocks(heads: Sequence[Any], method: str, dtype: Any) -> Any:
    """What `merge` returns, computed a block at a time, so that sums stay in a core's cache."""
    import torch

    blocks = zip(*(head.reshape(-1).split(BLOCK) for head in heads), strict=True)
    return torch.cat([merge(block, method, dtype) for block in blocks]).view_as(heads[0])
