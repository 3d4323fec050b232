"""Compares every tensor of a translated OUT with its formula over SOURCE's."""

import math
from collections.abc import Callable

from gqa_convert.verify.checkpoint_reader import Weights
from gqa_convert.verify.proofs import FOLDING, RECOMPUTED
from gqa_convert.verify.recomputed_merges import differing, half_unit, same_bits
from gqa_convert.verify.report import Failure
from gqa_convert.verify.rewriting import Expected, Rewriting


class TranslatedComparison:
    """The checks on tensors.

    Args:
        rewriting: what OUT must hold.
        out: tensors of OUT.
        progress: called with every number of bytes of OUT compared.
    """

    def __init__(self, rewriting: Rewriting, out: Weights, progress: Callable[[int], None]) -> None:
        self._rewriting = rewriting
        self._out = out
        self._progress = progress
        self._problems: dict[bool, list[str]] = {True: [], False: []}
        """Of tensors with K/V heads, and of all others."""
        self._counts = {True: 0, False: 0}
        self._summed = {True: 0, False: 0}
        self._complete = False

    def census(self) -> str:
        """OUT holds the tensors of its type, and SOURCE none that have no place in it."""
        expected = {name for formulas in self._rewriting.parts() for name in formulas}
        missing, extra = sorted(expected - set(self._out.file_of)), sorted(set(self._out.file_of) - expected)
        dropped, lost = self._rewriting.leftovers()
        gone = sorted(self._rewriting.used - set(self._rewriting.source.file_of))
        kinds = (
            (missing, "missing"),
            (extra, "too many"),
            (lost, "of SOURCE without a place in OUT"),
            (gone, "not in SOURCE"),
        )
        if any(names for names, _ in kinds):
            raise Failure(
                "; ".join(f"{len(names)} tensor(s) {what}: {', '.join(names[:3])}" for names, what in kinds if names)
            )
        return f"{len(expected)} tensors" + (
            f"; {len(dropped)} buffers of SOURCE that nothing reads dropped" if dropped else ""
        )

    def merged(self) -> str:
        """Every tensor with K/V heads; looks at all others too, for `rewritten`."""
        rewriting = self._rewriting
        if rewriting.groups != rewriting.sizes.heads and rewriting.method not in (*RECOMPUTED, *FOLDING):
            raise Failure(f"method {rewriting.method!r} can't be recomputed: only {', '.join(RECOMPUTED)}")
        names = rewriting.target_architecture.new.heads
        kinds = tuple(f".{name}.{kind}" for name in (names[1:] or names) for kind in ("weight", "bias"))
        for formulas in rewriting.parts():
            for name, formula in formulas.items():
                group = name.endswith(kinds)
                self._counts[group] += 1
                if problem := self._compare(name, formula, group):
                    self._problems[group].append(f"{name} {problem}")
        self._complete = True
        return self._judge(True, f"{rewriting.sizes.heads} -> {rewriting.groups} K/V heads, ")

    def rewritten(self) -> str:
        """Every other tensor, as `merged` found it: copied, folded, turned or filled."""
        if not self._complete:
            raise Failure("not looked at, since the merged tensors can't be")
        return self._judge(False, "")

    def errors(self) -> dict[str, float]:
        """|heads - merged head| / |heads| of every merged tensor, over SOURCE's heads; full after `merged`."""
        return {
            name: math.sqrt(error / norm) if norm else 0.0 for name, (error, norm) in self._rewriting.squares.items()
        }

    def _judge(self, group: bool, more: str) -> str:
        found, total = self._problems[group], self._counts[group]
        if found:
            raise Failure(f"{len(found)} of {total} tensors differ: {found[0]}")
        near = (
            f"; {self._summed[group]} of them, with folded biases or random numbers, within a rounding"
            if self._summed[group]
            else ""
        )
        return f"{total} tensors, {more}bit for bit{near}"

    def _compare(self, name: str, formula: Callable[[], Expected], group: bool) -> str | None:
        if name not in self._out.file_of:
            return "is missing"
        expected, shape = formula(), self._out.shape(name)
        if shape != tuple(expected.value.shape):
            return f"has shape {list(shape)} where {list(expected.value.shape)} belongs"
        if self._out.dtype(name) != expected.dtype:
            return f"has type {self._out.dtype(name)} where {expected.dtype} belongs"
        ours = self._out.rows(name, 0, shape[0])
        self._progress(ours.numel() * ours.itemsize)
        theirs = expected.value.to(expected.dtype)
        if expected.slack is None:
            return None if same_bits(ours, theirs) else f"in {differing(ours, theirs)} number(s)"
        self._summed[group] += 1
        off = (ours.double() - expected.value.double()).abs() > half_unit(
            expected.value, expected.dtype
        ) + expected.slack
        off |= ~ours.double().isfinite()
        return f"in {int(off.sum())} number(s)" if bool(off.any()) else None
