"""What `factor` promises without a text, checked on the weights of SOURCE and OUT alone: no shared head could lose less.

Values and outputs, and queries and keys, act through products: an output's columns with a value's rows, a query's rows with
a key's. A map that is folded from one factor into the other does not change them. With rotary positions the scores at all
distances are compared at once: a pair of rows that rotates with frequency f contributes Re(e^(i f t) (q x)* (k y)) at
distance t, and the products conj(q) k of different frequencies do not mix.

Shape legend: m source K/V heads in a group, c head_dim of keys or values, D outputs of the module, e inputs of a projection
plus, where there is a bias, one that is always 1 and whose weights are the bias, n numbers on a factor's free side, f rotary
pairs.
"""

import math
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gqa_convert.families.rotary import rotary_pairs
from gqa_convert.verify.geometry import Geometry, Heads, Module, Role, Tensors
from gqa_convert.verify.report import Failure
from gqa_convert.verify.result import FITTED, Result
from gqa_convert.verify.weights import PROVENANCE

SLACK = 3.0
"""The tolerance as a multiple of the error that rounding is expected to make."""
_EXACT = 1e-7
"""The relative error allowed for sums in float64."""


def check_functions(result: Result) -> str:
    """For a method that changes queries and outputs: the errors that OUT claims are possible and of SOURCE's modules, and
    for `factor` they are those of the tensors, and no shared head could lose less.
    """
    modules = {module.name: module for module in result.geometry.modules}
    errors, orders = result.claims["merge_error"], read_orders(result.claims, result.geometry)
    for name, error in errors.items():
        module = name.rpartition(".")[0]
        if not 0 <= error < math.inf or module not in modules or (error > 1e-6 and module not in result.foldable):
            raise Failure(f"{PROVENANCE} claims a merge error of {error} for {name}, which is not possible")
    for name, roles in result.foldable.items():
        if not any(error.startswith(f"{name}.") for error in errors):
            raise Failure(f"{PROVENANCE} has no merge_error for {name}")
        if result.method == FITTED:
            continue
        try:
            losses = module_losses(result, modules[name], orders.get(name), roles)
        except Failure as failure:
            raise Failure(f"{name}: {failure}, which {result.method} does not make") from None
        for part, loss in losses.items():
            stated = errors[f"{name}.{part}"]
            if not abs(stated - loss.error) <= loss.allowance / math.sqrt(loss.total or 1.0) + 1e-6:
                raise Failure(
                    f"{PROVENANCE} claims a merge error of {stated:.6f} for {name}.{part}, the tensors show "
                    f"{loss.error:.6f}"
                )
    if result.method == FITTED:
        return f"recorded for {len(result.foldable)} attention modules; the models show what they are worth"
    return f"no shared head of {len(result.foldable)} attention modules could lose less"


def read_orders(claims: dict[str, Any], geometry: Geometry) -> dict[str, list[int]]:
    """The order in which OUT claims that SOURCE's K/V heads were merged, by module, where it is not their own.

    Raises:
        Failure: a claim is not an order of a module's heads.
    """
    orders: dict[str, list[int]] = claims.get("head_order") or {}
    counts = {module.name: module.before for module in geometry.modules}
    for name, order in orders.items():
        if sorted(order) != list(range(counts.get(name, 0))):
            raise Failure(f"{PROVENANCE} claims head_order = {order} for {name}, which is no order of its K/V heads")
    return orders


@dataclass(frozen=True)
class Loss:
    """A squared distance of products."""

    lost: float = 0.0
    """|source - merged|^2."""
    total: float = 0.0
    """|source|^2."""
    noise: float = 0.0
    """The part of `lost` that rounding may have made."""

    def __add__(self, other: "Loss") -> "Loss":
        return Loss(self.lost + other.lost, self.total + other.total, self.noise + other.noise)

    @property
    def error(self) -> float:
        """|source - merged| / |source|."""
        return math.sqrt(max(self.lost, 0.0) / self.total) if self.total else 0.0

    @property
    def allowance(self) -> float:
        """How far rounding may have moved the distance |source - merged|."""
        return SLACK * math.sqrt(self.noise) + _EXACT * math.sqrt(self.total)


@dataclass(frozen=True)
class Products:
    """What K/V heads contribute through the heads that read them: left @ right, for each of m heads.

    A rotary pair is one complex row; its products are those of one frequency, in a leading axis.
    """

    left: Tensor
    """[..., m, n, c]."""
    right: Tensor
    """[..., m, c, e], or [..., 1, c, e] for a head that all readers share."""


def module_losses(result: Result, module: Module, order: list[int] | None, free: Container[Role]) -> dict[str, Loss]:
    """What a module's `keys` and `values` lose.

    Args:
        result: OUT.
        module: the module.
        order: in which SOURCE's K/V heads were merged; None for their own.
        free: the roles of whose heads the method may make anything.

    Raises:
        Failure: a group's keys or values are not the best that one head of this head_dim can be, up to rounding.
    """
    theirs = read_heads(module, result.inputs.source.tensors, converted=False)
    ours = read_heads(module, result.weights.tensors, converted=True)
    pairs = torch.empty(2, 0, dtype=torch.long)
    if module.kind != "cross":
        head_dim = theirs["key"].shape[1]
        pairs = torch.from_numpy(rotary_pairs(result.inputs.family, result.inputs.decoder_config, head_dim))
    limits = max((torch.finfo(heads.dtype) for heads in ours.values()), key=lambda each: each.eps)
    size = module.before // module.after
    found = {"keys": Loss(), "values": Loss()}
    for group in range(module.after):
        own = list(range(group * size, (group + 1) * size))
        merged = own if order is None else [order[head] for head in own]
        source = group_products(theirs, module.before, merged, merged, pairs)
        shared = group_products(ours, module.before, own, [group], pairs)
        for part, role in (("keys", "key"), ("values", "value")):
            for old, new in zip(source[part], shared[part], strict=True):
                found[part] += shared_loss(old, new, limits, f"{part} of group {group}" if role in free else None)
    return found


def read_heads(module: Module, tensors: Tensors, *, converted: bool) -> Heads:
    """The heads of a module's projections, [heads, c, e] and for the output [heads, c, D], with the bias as the last
    input.
    """
    found: Heads = {}
    for tensor in module.tensors:
        for role, heads in tensor.read(tensors, converted=converted).items():
            if heads.dim() == 3:
                found[role] = heads
            elif role in found:
                found[role] = torch.cat([found[role], heads[:, :, None]], 2)
    return found


def group_products(
    heads: Heads, kv_heads: int, readers: list[int], read: list[int], pairs: Tensor
) -> dict[str, list[Products]]:
    """The products of `keys`, those of rotary rows and those of the others, and of `values`.

    Args:
        heads: of a module.
        kv_heads: SOURCE's number, by which query heads and output heads are sorted.
        readers: the K/V heads whose query heads and output heads count.
        read: the K/V heads that they read.
        pairs: [2, f], the rows of a key that are real and imaginary parts.
    """
    queries, outputs = (heads[role].unflatten(0, (kv_heads, -1))[readers].double() for role in ("query", "output"))
    keys, values = (heads[role][read].double() for role in ("key", "value"))
    scores = []
    real, imaginary = pairs
    if len(real):
        conjugated = torch.complex(queries[:, :, real], -queries[:, :, imaginary]).permute(2, 0, 1, 3)
        turned = torch.complex(keys[:, real], keys[:, imaginary]).transpose(0, 1)
        scores.append(Products(conjugated.flatten(2)[..., None], turned[:, :, None]))
    rest = sorted(set(range(keys.shape[1])) - set(pairs.flatten().tolist()))
    if rest:
        scores.append(Products(queries[:, :, rest].mT.flatten(1, 2), keys[:, rest]))
    return {"keys": scores, "values": [Products(outputs.mT.flatten(1, 2), values)]}


def shared_loss(source: Products, merged: Products, limits: torch.finfo, what: str | None) -> Loss:
    """What the heads of a group lose by sharing one.

    The rows of the shared head must span the leading right singular vectors of all heads stacked (Eckart and Young 1936),
    of keys each as strong as its queries read it, of values as they are; and what reads them must be what reads the heads
    projected on that space.

    Args:
        source: the products of SOURCE's heads.
        merged: those of the shared head.
        limits: of the checkpoint's type.
        what: the heads in words ("keys of group 0") if they must be the best possible, else None.

    Raises:
        Failure: another shared head would lose less.
    """
    # in the space of the shared rows and beside it: |L R - L' S|^2 = |L R|^2 - |L R B|^2 + |L R B - L' S B|^2
    shared = merged.right[..., 0, :, :]
    basis = torch.linalg.qr(shared.mH).Q[..., None, :, :]  # [..., 1, e, c]
    seen = source.right @ basis
    kept = source.left @ seen
    moved = _square(kept - merged.left @ (merged.right @ basis))
    between = source.left.mH @ source.left
    total = float((between * (source.right @ source.right.mH).mT).sum().real)
    # sums of squares, where roundings of subnormal numbers are those of the smallest normal one
    rows, columns = (
        torch.linalg.vector_norm(factor, dim=axis) ** 2 + factor.shape[axis] * limits.tiny**2
        for factor, axis in ((merged.right, -1), (merged.left, -2))
    )
    noise = 2 * (limits.eps / 2) ** 2 * float((rows * columns).sum())
    loss = Loss(total - _square(kept) + moved, total, noise)
    if what:
        heads = source.right
        if what.startswith("keys"):
            values, vectors = torch.linalg.eigh(between)
            roots = values.clamp(min=0).sqrt()[..., :, None] * vectors.mH  # R with R^H R = left^H left, [..., m, c, c]
            heads = roots.to(heads.dtype) @ heads
        whole = _square(heads)
        unseen, best = whole - _square(heads @ basis), _least_loss(heads)
        rounding = (limits.eps / 2) ** 2 * float((rows / shared.abs().square().sum(-1).clamp(min=1e-300)).max())
        if not unseen <= best + (SLACK**2 * rounding + 1e-10) * whole:
            share, least = (math.sqrt(max(each, 0.0) / (whole or 1.0)) for each in (unseen, best))
            raise Failure(f"{what} lose {share:.4f}, the least possible is {least:.4f}")
        if not math.sqrt(moved) <= loss.allowance:
            raise Failure(f"what reads the {what} is not what reads their heads, projected on the shared head")
    # over all distances, a rotary pair has half of its product's square on average
    weight = 0.5 if source.right.is_complex() else 1.0
    return Loss(weight * loss.lost, weight * loss.total, weight * loss.noise)


def _square(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor)) ** 2


def _least_loss(heads: Tensor) -> float:
    """The least squared error of one head of c rows in place of heads [..., m, c, e]."""
    stacked = heads.flatten(-3, -2)
    squares = torch.linalg.eigvalsh(stacked @ stacked.mH).clamp(min=0)
    return float(squares[..., : -heads.shape[-2]].sum())
