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
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from gqa_convert.families.rotary import rotary_pairs
from gqa_convert.verify.geometry import Geometry, Heads, Module, Role, Tensors
from gqa_convert.verify.provenance import check_error
from gqa_convert.verify.report import Failure
from gqa_convert.verify.result import FITTED, Result
from gqa_convert.verify.weights import PROVENANCE

SLACK = 3.0
"""The tolerance as a multiple of the error that rounding is expected to make."""
_EXACT = 1e-7
"""The relative error allowed for sums in float64."""

Products = tuple[Tensor, Tensor]
"""What K/V heads contribute through the heads that read them: left @ right, for each of m heads.

left is [..., m, n, c]; right is [..., m, c, e], or [..., 1, c, e] for a head that all readers share. A rotary pair is one
complex row; its products are those of one frequency, in a leading axis.
"""


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
        if result.method != FITTED:
            for part, losses in module_losses(result, modules[name], orders.get(name), roles).items():
                check_error(f"{name}.{part}", errors[f"{name}.{part}"], *relative_error(losses))
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


def module_losses(result: Result, module: Module, order: list[int] | None, free: Collection[Role]) -> dict[str, Tensor]:
    """What a module's `keys` and `values` lose, as `compare_products` returns it, over all groups.

    Args:
        result: OUT.
        module: the module.
        order: in which SOURCE's K/V heads were merged; None for their own.
        free: the roles of whose heads the method may make anything.

    Raises:
        Failure: a group's keys or values are not the best that one head of this head_dim can be, up to rounding.
    """
    theirs = _read_heads(module, result.inputs.source.tensors, converted=False)
    ours = _read_heads(module, result.weights.tensors, converted=True)
    pairs = rotary_pairs(result.inputs.family, result.inputs.decoder_config, theirs["key"].shape[1])
    if module.kind == "cross":
        pairs = pairs[:, :0]
    if order is not None:
        theirs = {role: heads.unflatten(0, (module.before, -1))[order].flatten(0, 1) for role, heads in theirs.items()}
    limits = max((torch.finfo(heads.dtype) for heads in ours.values()), key=lambda each: each.eps)
    losses = {part: torch.zeros(3, dtype=torch.float64) for part in ("keys", "values")}
    for group in range(module.after):
        source, shared = (
            group_products(
                {role: each.unflatten(0, (module.after, -1))[group] for role, each in heads.items()},
                module.before // module.after,
                torch.from_numpy(pairs),
            )
            for heads in (theirs, ours)
        )
        for part, loss in losses.items():
            what = f"{module.name}: {part} of group {group}" if part.removesuffix("s") in free else ""
            for old, new in zip(source[part], shared[part], strict=True):
                loss += compare_products(old, new, limits, what)
    return losses


def relative_error(losses: Tensor) -> tuple[float, float]:
    """|source - merged| / |source| of what `compare_products` returns, and how far rounding may have moved it."""
    lost, total, rounding = losses.tolist()
    return math.sqrt(max(lost, 0.0) / (total or 1.0)), SLACK * math.sqrt(rounding / (total or 1.0)) + _EXACT


def _read_heads(module: Module, tensors: Tensors, *, converted: bool) -> Heads:
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


def group_products(heads: Heads, size: int, pairs: Tensor) -> dict[str, list[Products]]:
    """The products of `keys`, those of rotary rows and those of the others, and of `values`.

    Args:
        heads: of a group.
        size: m, by which query heads and output heads are sorted.
        pairs: [2, f], the rows of a key that are real and imaginary parts.
    """
    queries, outputs = (heads[role].double().unflatten(0, (size, -1)) for role in ("query", "output"))
    keys, values = (heads[role].double() for role in ("key", "value"))
    scores = []
    real, imaginary = pairs
    if len(real):
        # over all distances, a pair has half of its product's square on average
        conjugated = math.sqrt(0.5) * torch.complex(queries[:, :, real], -queries[:, :, imaginary])
        turned = torch.complex(keys[:, real], keys[:, imaginary])
        scores.append((conjugated.permute(2, 0, 1, 3).flatten(2)[..., None], turned.transpose(0, 1)[:, :, None]))
    rest = sorted(set(range(keys.shape[1])) - set(pairs.flatten().tolist()))
    if rest:
        scores.append((queries[:, :, rest].mT.flatten(1, 2), keys[:, rest]))
    return {"keys": scores, "values": [(outputs.mT.flatten(1, 2), values)]}


def compare_products(source: Products, shared: Products, limits: torch.finfo, what: str = "") -> Tensor:
    """What the heads of a group lose by sharing one; where `what` names them, no other head may lose less.

    The rows of the shared head must span the leading right singular vectors of all heads stacked (Eckart and Young 1936),
    of keys each as strong as its queries read it, of values as they are; and what reads them must be what reads the heads
    projected on that space.

    Args:
        source: the products of SOURCE's heads.
        shared: those of the shared head.
        limits: of the checkpoint's type.
        what: `keys` or `values` and their group, if the method may make anything of them.

    Returns:
        [3]: |source - merged|^2, |source|^2, and the part of the first that rounding may have made.

    Raises:
        Failure: another shared head would lose less.
    """
    (left, right), (shared_left, shared_right) = source, shared
    basis = torch.linalg.qr(shared_right.mH).Q  # [..., 1, e, c]
    read = torch.linalg.qr(left).R @ right  # [..., m, c, e], heads as strong as what reads them
    kept = left @ (right @ basis)
    moved = _square(kept - shared_left @ (shared_right @ basis))
    # roundings of subnormal numbers are those of the smallest normal one
    rows = shared_right.abs().square().sum(-1) + shared_right.shape[-1] * limits.tiny**2
    columns = shared_left.abs().square().sum(-2) + shared_left.shape[-2] * limits.tiny**2
    unit = limits.eps / 2
    rounding = 2 * unit**2 * float((rows * columns).sum())
    if what:
        heads = read if "keys" in what else right
        stacked = heads.flatten(-3, -2)
        squares = torch.linalg.eigvalsh(stacked @ stacked.mH).clamp(min=0)
        best = float(squares[..., : -right.shape[-2]].sum())
        whole = _square(heads)
        unseen = whole - _square(heads @ basis)
        turn = unit**2 * float((rows / shared_right.abs().square().sum(-1).clamp(min=1e-300)).max())
        if not unseen <= best + (SLACK**2 * turn + 1e-10) * whole:
            share, least = (math.sqrt(max(each, 0.0) / (whole or 1.0)) for each in (unseen, best))
            raise Failure(f"{what} lose {share:.4f}, the least possible is {least:.4f}")
        if not math.sqrt(moved) <= SLACK * math.sqrt(rounding) + _EXACT * math.sqrt(_square(kept)):
            raise Failure(f"{what}: what reads them is not what reads SOURCE's heads, projected on the shared head")
    total = _square(read)
    return torch.tensor([total - _square(kept) + moved, total, rounding], dtype=torch.float64)


def _square(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor)) ** 2
