"""What `factor` promises for every group, checked on the weights of SOURCE and OUT alone: no other shared head could
lose less.

Shape legend as in `functions`; m heads are merged into one.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from gqa_convert.verify.folded.constraints import FoldingConstraints
from gqa_convert.verify.folded.functions import SLACK, Loss, Products, score_products, value_products
from gqa_convert.verify.folded.heads import Heads
from gqa_convert.verify.report import Failure


def check_factored(source: Heads, merged: Heads, groups: int, constraints: FoldingConstraints) -> None:
    """Every group's keys and values are the best that one head of this head_dim can be, up to rounding.

    The criterion for scores is their own error. The criterion for values ignores how strongly the output reads them: the
    rows of the shared head span the leading right singular vectors of all heads stacked (Eckart and Young 1936), and the
    output is that of the heads projected on them.

    Args:
        source: SOURCE's heads.
        merged: OUT's heads, regrouped to SOURCE's number of K/V heads.
        groups: OUT's number of K/V heads.
        constraints: what could be folded.

    Raises:
        Failure: a group could lose less.
    """
    for pair in _groups(source, merged, groups, constraints):
        (_check_value_group if pair.part == "values" else _check_key_group)(pair)


@dataclass(frozen=True, slots=True)
class _Group:
    """The products of one group in SOURCE and in OUT."""

    part: Literal["keys", "values"]
    number: int
    source: Products
    merged: Products


def _groups(source: Heads, merged: Heads, groups: int, constraints: FoldingConstraints) -> Iterator[_Group]:
    """The products of every group that the method determines."""
    size = source.count // groups
    products: list[tuple[Literal["keys", "values"], Products, Products]] = []
    if constraints.values:
        products.append(("values", value_products(source), value_products(merged)))
    if constraints.keys:
        scores = (score_products(heads, constraints.pairs) for heads in (source, merged))
        products += [("keys", old, new) for old, new in zip(*scores, strict=True)]
    for number in range(groups):
        own = slice(number * size, (number + 1) * size)
        for part, old, new in products:
            yield _Group(part, number, _part(old, own), _part(new, own))


def _check_key_group(group: _Group) -> None:
    loss = Loss.between(group.source, group.merged)
    best = math.sqrt(float(_dropped(_roots(group.source), group.source.right).sum()))
    found = math.sqrt(max(loss.summed().lost, 0.0))
    if not found <= best + loss.allowance():
        whole = math.sqrt(loss.summed().total) or 1.0
        raise Failure(
            f"keys of group {group.number} lose {found / whole:.4f} of the scores, the least possible is {best / whole:.4f}"
        )


def _part(products: Products, heads: slice) -> Products:
    return Products(
        products.left[..., heads, :, :],
        products.right[..., heads, :, :],
        products.left_noise[..., heads, :],
        products.right_noise[..., heads, :],
    )


def _check_value_group(group: _Group) -> None:
    import torch

    source, merged = group.source, group.merged
    heads, shared = source.right, merged.right[0]
    total = float(heads.square().sum())
    basis = torch.linalg.qr(shared.T).Q  # [e, w]
    seen = heads @ basis  # [m, w, w]
    lost, best = total - float(seen.square().sum()), float(_dropped(None, heads).sum())
    strength = shared.square().sum(1)
    off = float((merged.right_noise[0] / strength.clamp(min=1e-300)).max())
    if not lost <= best + (SLACK**2 * off + 1e-10) * total:
        raise Failure(
            f"values of group {group.number} lose {_share(lost, total):.4f} of their heads, the least possible is "
            f"{_share(best, total):.4f}"
        )
    expected = Products(source.left, seen @ basis.T, source.left_noise, source.right_noise)
    loss = Loss.between(expected, merged)
    if not math.sqrt(max(loss.summed().lost, 0.0)) <= loss.allowance():
        raise Failure(
            f"outputs of group {group.number} are not those of its heads projected on the shared head (off by "
            f"{loss.error():.2g})"
        )


def _share(lost: float, total: float) -> float:
    return math.sqrt(max(lost, 0.0) / total) if total else 0.0


def _roots(products: Products) -> Any:
    """R with R^H R = left^H left, [..., m, c, c]."""
    import torch

    values, vectors = torch.linalg.eigh(products.left.mH @ products.left)
    return values.clamp(min=0).sqrt()[..., :, None] * vectors.mH


def _dropped(roots: Any, rows: Any) -> Any:
    """The least squared error of one head of c rows that replaces heads [..., m, c, e], weighted by their roots: [...]."""
    import torch

    weighted = (rows if roots is None else roots @ rows.to(roots.dtype)).flatten(-3, -2)
    squares = torch.linalg.eigvalsh(weighted @ weighted.mH).clamp(min=0)
    return squares[..., : -rows.shape[-2]].sum(-1)
