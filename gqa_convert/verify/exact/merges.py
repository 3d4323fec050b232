"""Merges the heads of a group again, in torch."""

from collections.abc import Iterable
from typing import Any

from gqa_convert.verify.numbers import wide_dtype


def merge(heads: Iterable[Any], method: str) -> Any:
    """The merged head of a group.

    Args:
        heads: tensors of one type and shape in head order; consumed one by one.
        method: mean or first.
    """
    total, count, dtype = None, 0, None
    for head in heads:
        if method == "first":
            return head
        if total is None:
            dtype = head.dtype
            total = head.to(wide_dtype(dtype), copy=True)
        else:
            total += head.to(total.dtype)
        count += 1
    assert total is not None
    return (total / count).to(dtype)


def merge_groups(heads: Any, groups: int, method: str) -> Any:
    """The merged heads [groups, ...] of all heads [heads, ...], in the type of `heads` and not rounded to any other.

    Args:
        heads: in the type that sums are kept in.
        groups: a divisor of the number of heads.
        method: mean or first.
    """
    grouped = heads.unflatten(0, (groups, heads.shape[0] // groups))
    if method == "first":
        return grouped[:, 0]
    total = grouped[:, 0].clone()
    for head in range(1, grouped.shape[1]):
        total += grouped[:, head]
    return total / grouped.shape[1]
