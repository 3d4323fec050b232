"""Measures how far the functions of merged heads are from SOURCE's: the contribution of values to the output, and the
scores of queries and keys.

Both are products, of an output's columns with a value's rows and of a query's rows with a key's. A map that is folded
from one factor into the other does not change them. With rotary positions the scores at all distances are compared at
once: a pair of rows that rotates with frequency f contributes Re(e^(i f t) (q x)* (k y)) at distance t, and the products
conj(q) k of different frequencies do not mix.

Shape legend: K source K/V heads, n numbers on a factor's free side, c rows that are summed over, e inputs; further axes
may come first.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gqa_convert.verify.folded.constraints import RotaryPairs
from gqa_convert.verify.folded.heads import Heads

SLACK = 3.0
"""The tolerance as a multiple of the error that rounding is expected to make."""
_EXACT = 1e-7
"""The relative error allowed for sums in float64."""


@dataclass(frozen=True, slots=True)
class Products:
    """The products left @ right of every K/V head, and the squared rounding error of each factor per row that is summed
    over.
    """

    left: Any
    """[..., K, n, c]."""
    right: Any
    """[..., K, c, e]."""
    left_noise: Any
    """[..., K, c]."""
    right_noise: Any
    """[..., K, c]."""

    def norm(self) -> Any:
        """|left @ right|^2, [..., K]."""
        return inner(self, self)

    def noise(self) -> Any:
        """The squared error that rounding may have made in the products, [..., K]."""
        rows = self.right.abs().square().sum(-1)
        columns = self.left.abs().square().sum(-2)
        return (self.left_noise * rows + columns * self.right_noise).sum(-1)


def inner(a: Products, b: Products) -> Any:
    """The inner product of two products of one shape, head by head, without computing either: [..., K]."""
    between = a.left.mH @ b.left
    across = b.right @ a.right.mH
    return (between * across.mT).sum((-2, -1)).real


@dataclass(frozen=True, slots=True)
class Loss:
    """Squared distances, head by head or summed."""

    lost: Any
    """|source - merged|^2."""
    total: Any
    """|source|^2."""
    noise: Any
    """The part of `lost` that rounding may have made."""

    @classmethod
    def between(cls, source: Products, merged: Products) -> "Loss":
        """The loss of [..., K] heads, summed over the axes before K."""
        parts = source.norm() + merged.norm() - 2 * inner(source, merged), source.norm(), merged.noise()
        return cls(*(part.reshape(-1, part.shape[-1]).sum(0) for part in parts))

    def __add__(self, other: "Loss") -> "Loss":
        return Loss(self.lost + other.lost, self.total + other.total, self.noise + other.noise)

    def scaled(self, factor: float) -> "Loss":
        """This loss times a factor."""
        return Loss(self.lost * factor, self.total * factor, self.noise * factor)

    def summed(self) -> "Loss":
        """The loss summed over all heads."""
        return Loss(*(float(part.sum()) for part in (self.lost, self.total, self.noise)))

    def error(self) -> float:
        """|source - merged| / |source| over all heads."""
        whole = self.summed()
        return math.sqrt(max(whole.lost, 0.0) / whole.total) if whole.total else 0.0

    def tolerance(self) -> float:
        """How far rounding may have moved `error`."""
        whole = self.summed()
        return SLACK * math.sqrt(whole.noise / whole.total) + _EXACT if whole.total else _EXACT

    def allowance(self) -> float:
        """How far rounding may have moved the distance |source - merged|."""
        whole = self.summed()
        return SLACK * math.sqrt(whole.noise) + _EXACT * math.sqrt(whole.total)


def value_products(heads: Heads) -> Products:
    """The contribution of each K/V head to the output through its query heads, [K, r D, w] x [K, w, e]."""
    return Products(heads.outputs.flatten(1, 2), heads.values, heads.noise["output"].sum(1), heads.noise["value"])


def score_products(heads: Heads, pairs: RotaryPairs) -> Iterator[Products]:
    """The scores of rotary rows, [f, K, r e, 1] x [f, K, 1, e] and complex, and those of the other rows."""
    import torch

    real, imaginary = (torch.tensor(rows, dtype=torch.long) for rows in (pairs.real, pairs.imaginary))
    head_dim = heads.keys.shape[1]
    rest = torch.tensor(sorted(set(range(head_dim)) - {*pairs.real, *pairs.imaginary}), dtype=torch.long)
    if len(real):
        queries = torch.complex(heads.queries[:, :, real], -heads.queries[:, :, imaginary])  # conjugated
        keys = torch.complex(heads.keys[:, real], heads.keys[:, imaginary])
        asked, seen = heads.noise["query"].sum(1), heads.noise["key"]
        yield Products(
            queries.permute(2, 0, 1, 3).flatten(2)[..., None],
            keys.transpose(0, 1)[:, :, None],
            (asked[:, real] + asked[:, imaginary]).T[..., None],
            (seen[:, real] + seen[:, imaginary]).T[..., None],
        )
    if len(rest):
        queries = heads.queries[:, :, rest].permute(0, 1, 3, 2).flatten(1, 2)
        yield Products(queries, heads.keys[:, rest], heads.noise["query"].sum(1)[:, rest], heads.noise["key"][:, rest])


def value_loss(source: Heads, merged: Heads) -> Loss:
    """The loss of values and outputs. `merged` is regrouped to the source's number of K/V heads."""
    return Loss.between(value_products(source), value_products(merged))


def score_loss(source: Heads, merged: Heads, pairs: RotaryPairs) -> Loss:
    """The loss of scores in the mean over all distances. `merged` is regrouped to the source's number of K/V heads.

    In that mean a rotary pair has half of its product's square.
    """
    found: Loss | None = None
    for old, new in zip(score_products(source, pairs), score_products(merged, pairs), strict=True):
        part = Loss.between(old, new).scaled(0.5 if old.right.is_complex() else 1.0)
        found = part if found is None else found + part
    assert found is not None
    return found
