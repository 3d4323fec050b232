"""Whether heads that absorb maps are made of the heads that they must be made of, and of nothing else.

A merged K/V head is a linear map of the rows of its group, with the root mean square of the group's heads. A query head, and
the columns of the output projection that a query head feeds, are linear maps of their own rows and columns. `fit` then
trains all of them: heads leave these spans by a share, and columns of the output projection may become anything. Where the
rows of a group span the whole space, as those of all heads together may, only sizes are compared.

Shape legend: H query heads, K and N K/V heads of SOURCE and OUT, c rows of a head, e inputs of a projection, with one more
for its bias.
"""

import torch
from torch import Tensor

from gqa_convert.verify.geometry import MERGED, Heads, Module, Tensors
from gqa_convert.verify.report import Failure
from gqa_convert.verify.result import FITTED, Result
from gqa_convert.verify.weights import PROVENANCE, half_units

_ROLES = ("query", "key", "value", "output")
_EXACT = 1e-6
"""Of a head's norm: what arithmetic in float32 may add to the rounding of the result."""
_DRIFT, _DRIFT_STEPS = 0.75, 100
"""Of a head's norm: how far so many gradient steps may move queries, and half as far keys and values; more steps with the
square root of their number. Good fits of small models have up to 0.55 in queries and 0.17 in keys and values; another head
has 0.91 or more in queries, and zeros have 1.
"""
_MOST = 0.9


def check_spans(result: Result) -> str:
    """Every head lies in the span of the heads that it was made from, is not zero unless they are, and K/V heads have their
    size.

    Raises:
        Failure: a head does not, or the recorded order of heads is none.
    """
    drift, worst = _EXACT, 0.0
    if result.method == FITTED:
        steps = (result.claims.get("calibration") or {}).get("steps", 0)
        drift = min(_MOST, _DRIFT * max(1.0, steps / _DRIFT_STEPS) ** 0.5)
    for module in result.geometry.merged:
        order = head_order(result, module)
        theirs = joined_heads(module, result.inputs.source.tensors)
        ours = joined_heads(module, result.weights.tensors, after=True)
        types = {result.weights.tensors[tensor.names_after[0]].dtype for tensor in module.tensors}
        coarsest = max(types, key=lambda dtype: torch.finfo(dtype).eps)
        for role in sorted(result.foldable[module.name].intersection(_ROLES)):
            heads = ours[role]
            made_from = in_order(theirs[role], order).reshape(len(heads), -1, heads.shape[-1])
            sizes = wanted = heads.norm(dim=(1, 2))
            off = outside(heads, made_from)
            if role == "output" and result.method == FITTED:
                off = torch.zeros_like(off)
            share = drift
            if role in MERGED:
                share = drift / 2
                wanted = made_from.norm(dim=(1, 2)) * (module.after / module.before) ** 0.5
                off = torch.maximum(off, (sizes - wanted).abs())
            off[sizes == 0] = made_from[sizes == 0].norm(dim=(1, 2))
            allowed = half_units(heads, coarsest).norm(dim=(1, 2)) + share * wanted
            shares = off / wanted.clamp(min=1e-30)
            if not (off <= allowed).all():
                head = int((off - allowed).argmax())
                raise Failure(
                    f"{role} head {head} of {module.name} is no map of the heads that it was made from, or has another size: "
                    f"{shares[head]:.2g} times its size is off"
                )
            worst = max(worst, float(shares.max()))
    return f"at most {worst:.2g} of a head is outside the span of the heads that it was made from"


def outside(heads: Tensor, made_from: Tensor) -> Tensor:
    """[n]: the norm of what of heads [n, c, e] lies outside the span of the rows [n, rows, e]."""
    if made_from.shape[1] >= heads.shape[2]:  # they span the whole space
        return heads.new_zeros(len(heads))
    space = torch.linalg.qr(made_from.mT).Q
    return (heads - heads @ space @ space.mT).norm(dim=(1, 2))


def head_order(result: Result, module: Module) -> list[int]:
    """SOURCE's K/V heads in the recorded order in which they were merged.

    Raises:
        Failure: it is no order of them.
    """
    order = result.claims.get("head_order", {}).get(module.name, [*range(module.before)])
    if sorted(order) != [*range(module.before)]:
        raise Failure(f"{PROVENANCE} claims head_order = {order} for the {module.before} heads of {module.name}")
    return list(order)


def joined_heads(module: Module, tensors: Tensors, *, after: bool = False) -> Heads:
    """The heads of queries, keys and values with their biases, [heads, c, e], and the columns of the output projection that
    each query head feeds, [H, c, outputs], in float64.

    Args:
        module: whose heads they are.
        tensors: of SOURCE.
        after: they are OUT's.
    """
    found: Heads = {}
    for tensor in module.tensors:  # weights before their biases
        for role, heads in (tensor.read_after(tensors) if after else tensor.read(tensors)).items():
            if role == "output":
                heads = heads.reshape(module.heads, -1, heads.shape[-1])
            if role in found:
                heads = torch.cat([found[role], heads.double().unsqueeze(-1)], -1)
            if role in _ROLES:
                found[role] = heads.double()
    return found


def in_order(heads: Tensor, order: list[int]) -> Tensor:
    """[K, r, ...]: heads by the K/V head that they belong to, in the order in which these were merged."""
    return heads.unflatten(0, (len(order), -1))[order]
