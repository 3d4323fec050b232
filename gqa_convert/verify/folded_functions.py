"""The check on what absorbing methods make of attention, module by module: measured from both checkpoints, held against
the claims.
"""

import math
from collections.abc import Iterator
from typing import Any

from gqa_convert.verify.folder import PROVENANCE
from gqa_convert.verify.folding_constraints import FoldingConstraints
from gqa_convert.verify.functions import Loss, score_loss, value_loss
from gqa_convert.verify.heads import Heads
from gqa_convert.verify.optima import check_aligned, check_factored
from gqa_convert.verify.proofs import PROOFS, Proof
from gqa_convert.verify.report import Failure

_CHECKS = {Proof.ROTATED: check_aligned, Proof.OPTIMAL: check_factored}
"""What is asked of each module."""
_CONCLUSIONS = {
    Proof.ROTATED: "as claimed; turned, averaged, no shorter than the mean",
    Proof.OPTIMAL: "as claimed, and the least that one head can lose",
    Proof.MEASURED: "measured with every input alike, which is not what was fitted: the claims are finite, and no more "
    "is known",
}

Module = tuple[str, Heads, Heads, FoldingConstraints, bool]
"""Name, heads of SOURCE and of OUT, what can be absorbed, and whether all of SOURCE's numbers can be told from OUT's (a
norm whose gain is zero, folded in, hides some)."""


def check_functions(modules: Iterator[Module], names: set[str], method: str, claimed: Any, orders: Any = None) -> str:
    """How far OUT's values and scores are from SOURCE's, against what the method promises and what OUT claims.

    Args:
        modules: those that were merged, one in memory at a time.
        names: of them all, and of those that were left alone, as the claims have them.
        method: align, factor or fit.
        claimed: merge errors in OUT's provenance.
        orders: in which order SOURCE's K/V heads were merged, by module, where it is not their own; for factor and fit.
    """
    errors = _read_claims(claimed, names)
    orders = orders or {}
    if orders and (PROOFS[method] is Proof.ROTATED or not isinstance(orders, dict) or not set(orders) <= names):
        raise Failure(f"{PROVENANCE} claims a head_order where {method} leaves heads in their places")
    found: dict[str, list[float]] = {"values": [], "scores": []}
    hidden, left = 0, dict(errors)
    for module, source, merged, constraints, whole in modules:
        left = {name: error for name, error in left.items() if not name.startswith(f"{module}.")}
        if module in orders:
            source = _ordered(module, source, orders[module])
        groups, merged = merged.count, merged.regrouped(source.count)
        losses = {"values": value_loss(source, merged), "scores": score_loss(source, merged, constraints.pairs)}
        for what, loss in losses.items():
            if not math.isfinite(loss.error()):
                raise Failure(f"{module} has {what} that are not finite")
            found[what].append(loss.error())
        if PROOFS[method] is Proof.MEASURED:
            if not any(name.startswith(f"{module}.") for name in errors):
                raise Failure(f"{PROVENANCE} has no merge_error for {module}")
        elif whole:
            _check_module(module, source, merged, groups, constraints, method)
            _check_claims(module, losses, errors)
        else:
            hidden += 1
    if any(error > 1e-6 for error in left.values()):
        raise Failure(f"{PROVENANCE} claims a merge error of {max(left.values()):.6f} for heads that were left alone")
    if not found["values"]:
        return "no heads were merged"
    ranges = ", ".join(f"{what} {min(values):.4f} to {max(values):.4f}" for what, values in found.items())
    proof = _CONCLUSIONS[PROOFS[method]]
    unknown = f"; {hidden} only measured, since gains of zero hide their inputs" if hidden else ""
    return f"relative errors in {len(found['values'])} attention modules: {ranges}; {proof}{unknown}"


def _ordered(module: str, source: Heads, order: Any) -> Heads:
    if not isinstance(order, list) or sorted(order, key=str) != sorted(range(source.count), key=str):
        raise Failure(
            f"{PROVENANCE} claims head_order = {order!r} for {module}, which is no order of its {source.count} K/V heads"
        )
    return source.ordered(order)


def _check_module(
    module: str, source: Heads, merged: Heads, groups: int, constraints: FoldingConstraints, method: str
) -> None:
    try:
        _CHECKS[PROOFS[method]](source, merged, groups, constraints)
    except Failure as failure:
        raise Failure(f"{module}: {failure}, which is not what {method} makes") from None


def _read_claims(claimed: Any, names: set[str]) -> dict[str, float]:
    if not isinstance(claimed, dict) or not claimed:
        raise Failure(f"{PROVENANCE} has no merge_error")
    for name, error in claimed.items():
        if not isinstance(error, float | int) or isinstance(error, bool) or not math.isfinite(error) or error < 0:
            raise Failure(f"{PROVENANCE} claims a merge error of {error!r} for {name}")
        if name.rpartition(".")[0] not in names:
            raise Failure(f"{PROVENANCE} claims a merge error for {name}, which is no attention module of SOURCE")
    return claimed


def _check_claims(module: str, losses: dict[str, Loss], errors: dict[str, float]) -> None:
    for what, part in (("scores", "keys"), ("values", "values")):
        name, loss = f"{module}.{part}", losses[what]
        if name not in errors:
            raise Failure(f"{PROVENANCE} has no merge_error for {name}")
        if not abs(errors[name] - loss.error()) <= loss.tolerance() + 1e-6:
            raise Failure(
                f"{PROVENANCE} claims a merge error of {errors[name]:.6f} for {name} where {loss.error():.6f} is true"
            )
