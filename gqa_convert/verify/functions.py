"""How far the functions of merged heads are from the source's: what values bring to the output, and the scores of
queries and keys.

Both are products, of an output's columns with a value's rows and of a query's with a key's, so that neither signs nor
any map that one factor absorbs of the other matters. Under rotary positions the scores of all distances are compared at
once: of a pair of rows that turns with frequency f they are Re(e^(i f t) (q x)* (k y)) at distance t, and the products
conj(q) k of different frequencies do not mix.

Shape legend: K source K/V heads, n numbers on a factor's free side, c rows that are summed over, e inputs; more axes
may stand in front.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gqa_convert.verify.folding_constraints import Pairs
from gqa_convert.verify.heads import Heads

SLACK = 3.0
"""How many times what rounding may be expected to do is allowed for."""
_EXACT = 1e-7
"""What sums in float64 may be off by, relative."""


@dataclass(frozen=True, slots=True)
class Products:
    """Products left @ right of every K/V head, with what rounding of their factors may be, squared and summed per row
    that is summed over.
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
        """What rounding may have done to the products: the square of it, [..., K]."""
        rows = self.right.abs().square().sum(-1)
        columns = self.left.abs().square().sum(-2)
        return (self.left_noise * rows + columns * self.right_noise).sum(-1)


def inner(a: Products, b: Products) -> Any:
    """The inner product of two products of one shape, head by head, without making them: [..., K]."""
    between = a.left.mH @ b.left
    across = b.right @ a.right.mH
    return (between * across.mT).sum((-2, -1)).real


@dataclass(frozen=True, slots=True)
class Loss:
    """Squared distances, head by head or summed."""

    lost: Any
    total: Any
    noise: Any

    @classmethod
    def between(cls, source: Products, merged: Products) -> "Loss":
        """Of [..., K] heads, summed over whatever stands in front."""
        parts = source.norm() + merged.norm() - 2 * inner(source, merged), source.norm(), merged.noise()
        return cls(*(part.reshape(-1, part.shape[-1]).sum(0) for part in parts))

    def __add__(self, other: "Loss") -> "Loss":
        return Loss(self.lost + other.lost, self.total + other.total, self.noise + other.noise)

    def scaled(self, factor: float) -> "Loss":
        return Loss(self.lost * factor, self.total * factor, self.noise * factor)

    def summed(self, heads: slice = slice(None)) -> "Loss":
        return Loss(*(float(part[heads].sum()) for part in (self.lost, self.total, self.noise)))

    def error(self) -> float:
        """|source - merged| / |source| over all heads."""
        whole = self.summed()
        return math.sqrt(max(whole.lost, 0.0) / whole.total) if whole.total else 0.0

    def tolerance(self) -> float:
        """By how much rounding may have moved `error`."""
        whole = self.summed()
        return SLACK * math.sqrt(whole.noise / whole.total) + _EXACT if whole.total else _EXACT

    def allowance(self) -> float:
        """The same of the distance itself."""
        whole = self.summed()
        return SLACK * math.sqrt(whole.noise) + _EXACT * math.sqrt(whole.total)


def value_products(heads: Heads) -> Products:
    """What each K/V head's query heads bring to the output, [K, r D, w] x [K, w, e]."""
    return Products(heads.outputs.flatten(1, 2), heads.values, heads.noise["output"].sum(1), heads.noise["value"])


def score_products(heads: Heads, pairs: Pairs) -> Iterator[Products]:
    """Scores of the rows that turn, [f, K, r e, 1] x [f, K, 1, e] and complex, and of those that do not."""
    import torch

    real, imaginary = (torch.tensor(rows, dtype=torch.long) for rows in pairs)
    width = heads.keys.shape[1]
    rest = torch.tensor(sorted(set(range(width)) - {*pairs[0], *pairs[1]}), dtype=torch.long)
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
    """Of values and outputs; `merged` is regrouped to the source's count."""
    return Loss.between(value_products(source), value_products(merged))


def score_loss(source: Heads, merged: Heads, pairs: Pairs) -> Loss:
    """Of scores, in the mean over all distances, at which a turning pair has half of its product's square; `merged` is
    regrouped.
    """
    found: Loss | None = None
    for old, new in zip(score_products(source, pairs), score_products(merged, pairs), strict=True):
        part = Loss.between(old, new).scaled(0.5 if old.right.is_complex() else 1.0)
        found = part if found is None else found + part
    assert found is not None
    return found
