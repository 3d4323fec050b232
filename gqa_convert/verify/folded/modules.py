"""The check `attention functions`: what every attention module computes, against the method's promise and OUT's claims."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gqa_convert.verify.files.provenance import PROVENANCE
from gqa_convert.verify.folded.constraints import FoldingConstraints
from gqa_convert.verify.folded.functions import Loss, score_loss, value_loss
from gqa_convert.verify.folded.heads import Heads
from gqa_convert.verify.folded.optima import check_factored
from gqa_convert.verify.proofs import PROOFS, Proof
from gqa_convert.verify.report import Failure, Finding

_CONCLUSIONS = {
    Proof.OPTIMAL: "as claimed, and no shared head could lose less",
    Proof.MEASURED: (
        "measured on inputs that all count alike, while the fit weighted them by its text: the claims are finite, and "
        "no more can be known"
    ),
}


@dataclass(frozen=True, slots=True)
class ModuleHeads:
    """One attention module in both checkpoints."""

    name: str
    source: Heads
    merged: Heads
    constraints: FoldingConstraints
    complete: bool
    """Whether OUT determines all of SOURCE's numbers. The gain of a folded norm hides some where it is zero."""


@dataclass(frozen=True, slots=True)
class FoldingClaims:
    """OUT's claims about the functions of its modules."""

    errors: Mapping[str, float]
    """Merge errors of `MODULE.keys` and `MODULE.values`."""
    orders: Mapping[str, Any]
    """The order in which SOURCE's K/V heads were merged, by module, where it is not their own."""


def read_folding_claims(claims: dict[str, Any], names: set[str], method: str) -> FoldingClaims:
    """The claims about functions in OUT's provenance record.

    Args:
        claims: OUT's provenance record.
        names: all attention modules of SOURCE, as the claims name them.
        method: factor or fit.

    Raises:
        Failure: a claim has the wrong form, or names something else than an attention module.
    """
    errors, orders = claims.get("merge_error"), claims.get("head_order") or {}
    if not isinstance(errors, dict) or not errors:
        raise Failure(f"{PROVENANCE} has no merge_error")
    for name, error in errors.items():
        if not isinstance(error, float | int) or isinstance(error, bool) or not math.isfinite(error) or error < 0:
            raise Failure(f"{PROVENANCE} claims a merge error of {error!r} for {name}, expected a number of at least 0")
        if name.rpartition(".")[0] not in names:
            raise Failure(f"{PROVENANCE} claims a merge error for {name}, which is not an attention module of SOURCE")
    if orders and (not isinstance(orders, dict) or not set(orders) <= names):
        raise Failure(f"{PROVENANCE} claims head_order = {orders!r}, which {method} does not make")
    return FoldingClaims(errors, orders)


def check_functions(modules: Iterator[ModuleHeads], names: set[str], method: str, claims: dict[str, Any]) -> Finding:
    """Measure how far OUT's values and scores are from SOURCE's.

    Args:
        modules: the modules that were merged, one in memory at a time.
        names: all attention modules of SOURCE, as the claims name them.
        method: factor or fit.
        claims: OUT's provenance record.
    """
    claimed = read_folding_claims(claims, names, method)
    checker = _ModuleChecker(method, claimed)
    for module in modules:
        checker.check(module)
    unmerged = [error for name, error in claimed.errors.items() if name.rpartition(".")[0] not in checker.checked]
    if any(error > 1e-6 for error in unmerged):
        raise Failure(f"{PROVENANCE} claims a merge error of {max(unmerged):.6f} for a module that was not merged")
    return checker.finding()


class _ModuleChecker:
    """Checks modules one by one and keeps their errors."""

    def __init__(self, method: str, claims: FoldingClaims) -> None:
        self._method = method
        self._proof = PROOFS[method]
        self._claims = claims
        self._errors: dict[str, list[float]] = {"values": [], "scores": []}
        self._incomplete = 0
        self.checked: set[str] = set()

    def check(self, module: ModuleHeads) -> None:
        self.checked.add(module.name)
        source = self._ordered(module)
        merged = module.merged.regrouped(source.count)
        losses = {
            "values": value_loss(source, merged),
            "scores": score_loss(source, merged, module.constraints.pairs),
        }
        for what, loss in losses.items():
            if not math.isfinite(loss.error()):
                raise Failure(f"the {what} of {module.name} are not finite")
            self._errors[what].append(loss.error())
        if self._proof is Proof.MEASURED:
            if not any(name.rpartition(".")[0] == module.name for name in self._claims.errors):
                raise Failure(f"{PROVENANCE} has no merge_error for {module.name}")
        elif module.complete:
            self._check_promise(module, source, merged)
            self._check_claims(module.name, losses)
        else:
            self._incomplete += 1

    def _ordered(self, module: ModuleHeads) -> Heads:
        """SOURCE's heads in the order in which they were merged."""
        source = module.source
        if module.name not in self._claims.orders:
            return source
        order = self._claims.orders[module.name]
        if not isinstance(order, list) or sorted(order, key=str) != sorted(range(source.count), key=str):
            raise Failure(
                f"{PROVENANCE} claims head_order = {order!r} for {module.name}, expected its {source.count} K/V heads"
            )
        return source.ordered(order)

    def _check_promise(self, module: ModuleHeads, source: Heads, merged: Heads) -> None:
        try:
            check_factored(source, merged, module.merged.count, module.constraints)
        except Failure as failure:
            raise Failure(f"{module.name}: {failure}, which {self._method} does not make") from None

    def _check_claims(self, module: str, losses: dict[str, Loss]) -> None:
        for what, part in (("scores", "keys"), ("values", "values")):
            name, loss = f"{module}.{part}", losses[what]
            claimed = self._claims.errors.get(name)
            if claimed is None:
                raise Failure(f"{PROVENANCE} has no merge_error for {name}")
            if not abs(claimed - loss.error()) <= loss.tolerance() + 1e-6:
                raise Failure(
                    f"{PROVENANCE} claims a merge error of {claimed:.6f} for {name}, the tensors show {loss.error():.6f}"
                )

    def finding(self) -> Finding:
        """The range of errors over all modules."""
        count = len(self._errors["values"])
        if not count:
            return Finding("no heads were merged", {"modules": 0})
        numbers = {"modules": float(count)}
        for what, errors in self._errors.items():
            numbers |= {f"least error of {what}": min(errors), f"largest error of {what}": max(errors)}
        ranges = ", ".join(f"{what} {min(errors):.4f} to {max(errors):.4f}" for what, errors in self._errors.items())
        hidden = (
            f"; {self._incomplete} only measured, since gains of zero hide their inputs" if self._incomplete else ""
        )
        return Finding(
            f"relative errors in {count} attention modules: {ranges}; {_CONCLUSIONS[self._proof]}{hidden}", numbers
        )
