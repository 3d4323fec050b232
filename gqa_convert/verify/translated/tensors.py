"""Compares every tensor of a translated OUT with its formula over SOURCE's tensors."""

from collections.abc import Callable
from typing import Any

from gqa_convert.verify.checkpoint_reader import Weights
from gqa_convert.verify.numbers import bits_differ, half_unit
from gqa_convert.verify.proofs import FOLDING, RECOMPUTED
from gqa_convert.verify.report import Failure, Finding
from gqa_convert.verify.translated.rewriting import Rewriting
from gqa_convert.verify.translated.source_tensors import Expected, Formula


class Compared:
    """What was found in one kind of tensors."""

    def __init__(self) -> None:
        self.count = 0
        self.rounded = 0
        """Tensors that were compared up to a rounding."""
        self.problems: list[str] = []

    def finding(self, more: str) -> Finding:
        """The result; raises Failure if a tensor differs."""
        if self.problems:
            raise Failure(
                f"{len(self.problems)} of {self.count} tensors differ: {self.problems[0]}",
                {"tensors": self.count, "differing": len(self.problems)},
            )
        near = f"; {self.rounded} of them, with folded biases, within a rounding" if self.rounded else ""
        return Finding(
            f"{self.count} tensors, {more}bit for bit{near}", {"tensors": self.count, "within a rounding": self.rounded}
        )


class TranslatedComparison:
    """The checks on tensors.

    Args:
        rewriting: the formulas of OUT's tensors.
        out: OUT's tensors.
        progress: called with the number of bytes of each tensor compared.
    """

    def __init__(self, rewriting: Rewriting, out: Weights, progress: Callable[[int], None]) -> None:
        self._rewriting = rewriting
        self._out = out
        self._progress = progress
        self._with_kv_heads, self._others = Compared(), Compared()
        self._complete = False

    def names(self) -> Finding:
        """OUT has the tensors of its type, and SOURCE has none that OUT has no place for."""
        expected = {name for formulas in self._rewriting.parts() for name in formulas}
        missing, extra = sorted(expected - self._out.file_of.keys()), sorted(self._out.file_of.keys() - expected)
        dropped, lost = self._rewriting.unused()
        absent = sorted(self._rewriting.used - self._rewriting.source.file_of.keys())
        kinds = (
            (missing, "missing"),
            (extra, "extra"),
            (lost, "of SOURCE without a place in OUT"),
            (absent, "missing in SOURCE"),
        )
        if any(names for names, _ in kinds):
            raise Failure(
                "; ".join(f"{len(names)} tensor(s) {what}: {', '.join(names[:3])}" for names, what in kinds if names)
            )
        buffers = f"; {len(dropped)} buffers of SOURCE that no class reads dropped" if dropped else ""
        return Finding(f"{len(expected)} tensors{buffers}", {"tensors": len(expected), "dropped": len(dropped)})

    def merged(self) -> Finding:
        """Every tensor with K/V heads equals its formula. The other tensors are compared too, for `rewritten`."""
        rewriting = self._rewriting
        if rewriting.changed and rewriting.method not in (*RECOMPUTED, *FOLDING):
            raise Failure(f"method {rewriting.method!r} cannot be recomputed: only {', '.join(RECOMPUTED)} can")
        names = rewriting.target.new.heads
        endings = tuple(f".{name}.{kind}" for name in (names[1:] or names) for kind in ("weight", "bias"))
        for formulas in rewriting.parts():
            for name, formula in formulas.items():
                group = self._with_kv_heads if name.endswith(endings) else self._others
                group.count += 1
                if problem := self._compare(name, formula, group):
                    group.problems.append(f"{name} {problem}")
        self._complete = True
        return self._with_kv_heads.finding(f"{rewriting.sizes.heads} -> {rewriting.groups} K/V heads, ")

    def rewritten(self) -> Finding:
        """Every other tensor equals its formula: it is copied, folded, reordered or filled. `merged` compared them."""
        if not self._complete:
            raise Failure("not compared, since the merged tensors cannot be")
        return self._others.finding("")

    def errors(self) -> dict[str, float]:
        """The merge error of every merged tensor, over SOURCE's heads; complete after `merged`."""
        return self._rewriting.errors.values()

    def _compare(self, name: str, formula: Formula, group: Compared) -> str | None:
        """What is wrong with a tensor, in words."""
        if name not in self._out.file_of:
            return "is missing"
        expected = formula()
        if problem := self._header_differs(name, expected):
            return problem
        ours = self._read(name)
        if expected.slack is None:
            problem = bits_differ(ours, expected.value.to(expected.dtype))
            return f"in {problem}" if problem else None
        group.rounded += 1
        allowed = half_unit(expected.value, expected.dtype) + expected.slack
        off = (ours.double() - expected.value.double()).abs() > allowed
        off |= ~ours.double().isfinite()
        return f"in {int(off.sum())} number(s)" if bool(off.any()) else None

    def _header_differs(self, name: str, expected: Expected) -> str | None:
        """What is wrong with the shape or type of OUT's tensor."""
        shape, dtype = self._out.shape(name), self._out.dtype(name)
        if shape != tuple(expected.value.shape):
            return f"has shape {list(shape)}, expected {list(expected.value.shape)}"
        return None if dtype == expected.dtype else f"has type {dtype}, expected {expected.dtype}"

    def _read(self, name: str) -> Any:
        """A tensor of OUT, which counts as progress."""
        ours = self._out.whole(name)
        self._progress(ours.numel() * ours.itemsize)
        return ours
