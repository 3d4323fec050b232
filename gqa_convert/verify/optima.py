"""What `factor` and `align` promise of every group, told from the weights of SOURCE and OUT alone.

factor: no other shared head could lose less. align: heads were only turned, by rotations that cancel in the products,
    and averaged. Shape legend as in `functions`; m heads are merged into one.
"""

import math
from typing import Any

from gqa_convert.verify.folding_constraints import FoldingConstraints
from gqa_convert.verify.functions import SLACK, Loss, Products, score_products, value_products
from gqa_convert.verify.heads import Heads
from gqa_convert.verify.report import Failure


def check_factored(source: Heads, merged: Heads, groups: int, constraints: FoldingConstraints) -> None:
    """Every group's keys and values are the best that one head of this width can be, but for rounding.

    The criterion for scores is their own error. That for values leaves out how strongly the output reads them: the rows
    of the shared head span the leading right singular vectors of all heads stacked (Eckart and Young 1936), and the
    output is that of the heads projected on them.

    Args:
        source: of SOURCE.
        merged: of OUT, with as many K/V heads as the source.
        groups: of OUT.
        freedom: what could be absorbed.
    """
    size = source.count // groups
    for group in range(groups):
        own = slice(group * size, (group + 1) * size)
        if constraints.values:
            _check_value_group(_part(value_products(source), own), _part(value_products(merged), own), group)
        if constraints.keys:
            for old, new in zip(
                score_products(source, constraints.pairs), score_products(merged, constraints.pairs), strict=True
            ):
                loss = Loss.between(_part(old, own), _part(new, own))
                best = float(_dropped(_roots(old, own), old.right[..., own, :, :]).sum())
                found = math.sqrt(max(loss.summed().lost, 0.0))
                if not found <= math.sqrt(best) + loss.allowance():
                    whole = math.sqrt(loss.summed().total) or 1.0
                    raise Failure(
                        f"keys of group {group} lose {found / whole:.4f} of the scores where {math.sqrt(best) / whole:.4f} is the least"
                    )


def _part(products: Products, heads: slice) -> Products:
    return Products(
        products.left[..., heads, :, :],
        products.right[..., heads, :, :],
        products.left_noise[..., heads, :],
        products.right_noise[..., heads, :],
    )


def _check_value_group(source: Products, merged: Products, group: int) -> None:
    import torch

    heads, shared = source.right, merged.right[0]
    total = float(heads.square().sum())
    basis = torch.linalg.qr(shared.T).Q  # [e, w]
    seen = heads @ basis  # [m, w, w]
    lost, best = total - float(seen.square().sum()), float(_dropped(None, heads).sum())
    strength = shared.square().sum(1)
    off = float((merged.right_noise[0] / strength.clamp(min=1e-300)).max())
    if not lost <= best + (SLACK**2 * off + 1e-10) * total:
        raise Failure(
            f"values of group {group} lose {_share(lost, total):.4f} where {_share(best, total):.4f} is the least for their heads"
        )
    expected = Products(source.left, seen @ basis.T, source.left_noise, source.right_noise)
    loss = Loss.between(expected, merged)
    if not math.sqrt(max(loss.summed().lost, 0.0)) <= loss.allowance():
        raise Failure(
            f"outputs of group {group} are not those of its heads on the shared head ({loss.error():.2g} off)"
        )


def _share(lost: float, total: float) -> float:
    return math.sqrt(max(lost, 0.0) / total) if total else 0.0


def _roots(products: Products, heads: slice) -> Any:
    """R with R^H R = left^H left, [..., m, c, c]."""
    import torch

    left = products.left[..., heads, :, :]
    values, vectors = torch.linalg.eigh(left.mH @ left)
    return values.clamp(min=0).sqrt()[..., :, None] * vectors.mH


def _dropped(roots: Any, rows: Any) -> Any:
    """The least that heads [..., m, c, e] lose, weighed, when one head of c rows replaces them: [...]."""
    import torch

    weighed = (rows if roots is None else roots @ rows.to(roots.dtype)).flatten(-3, -2)
    squares = torch.linalg.eigvalsh(weighed @ weighed.mH).clamp(min=0)
    return squares[..., : -rows.shape[-2]].sum(-1)


def check_aligned(source: Heads, merged: Heads, groups: int, constraints: FoldingConstraints) -> None:
    """Every group's keys and values are a mean of turned heads, and no shorter than the plain mean, but for rounding.

    Args:
        source: of SOURCE.
        merged: of OUT, with as many K/V heads as the source.
        groups: of OUT.
        freedom: what could be absorbed.
    """
    size = source.count // groups
    for group in range(groups):
        own = slice(group * size, (group + 1) * size)
        if constraints.values:
            _check_turned(
                _part(value_products(source), own), _part(value_products(merged), own), f"values of group {group}"
            )
        if constraints.keys:
            for old, new in zip(
                score_products(source, constraints.pairs), score_products(merged, constraints.pairs), strict=True
            ):
                _check_turned(_part(old, own), _part(new, own), f"keys of group {group}")


def _check_turned(source: Products, merged: Products, what: str) -> None:
    """left' = left T and right' = the mean of T^H right, with unitary T."""
    import torch

    shared, noise = merged.right[..., 0, :, :], merged.right_noise[..., 0, :].sum(-1)
    plain = source.right.mean(-3)
    length = shared.abs().square().sum((-2, -1))
    wanted = float(plain.abs().square().sum())
    if not float(length.sum()) >= wanted * (1 - 1e-6) - 2 * SLACK * float((length * noise).sqrt().sum()):
        raise Failure(f"{what} are shorter than the plain mean of the heads: these were not aligned")
    before, after, between = (
        a.mH @ b for a, b in ((source.left, source.left), (merged.left, merged.left), (source.left, merged.left))
    )
    square = before.abs().square().sum((-2, -1))
    apart = square + after.abs().square().sum((-2, -1)) - 2 * between.abs().square().sum((-2, -1))
    off = merged.left_noise.sum(-1)
    if bool((apart > 4 * SLACK**2 * off * merged.left.abs().square().sum((-2, -1)) + 1e-13 * square).any()):
        raise Failure(f"what reads the {what} was not turned as the source's")
    weakest = torch.linalg.eigvalsh(before)
    if bool((weakest[..., 0] < 1e-6 * weakest[..., -1]).any()) or not bool((weakest[..., -1] > 0).all()):
        return  # rows that nothing reads: their turn can't be told
    turns = torch.linalg.solve(before, between)
    expected = (turns.mH @ source.right).mean(-3)
    loose = ((off / weakest[..., 0]).sqrt() * source.right.abs().square().sum((-2, -1)).sqrt()).mean(-1)
    gap = (expected - shared).abs().square().sum((-2, -1)).sqrt()
    if bool((gap > SLACK * (loose + noise.sqrt()) + 1e-7 * length.sqrt()).any()):
        raise Failure(f"{what} are not the mean of their heads as turned")
