"""The checks on tensors where maps of keys and values are folded into queries and outputs: what may differ from SOURCE,
and what may not.
"""

from collections.abc import Callable, Iterator
from typing import Any

from gqa_convert.families.family import Family
from gqa_convert.verify.checkpoint_reader import Weights
from gqa_convert.verify.exact.tensors import TensorComparison
from gqa_convert.verify.folded.constraints import FoldingConstraints, read_folding_constraints
from gqa_convert.verify.folded.heads import HeadReader
from gqa_convert.verify.folded.modules import ModuleHeads, check_functions
from gqa_convert.verify.geometry import Counts, Cut, Geometry, attention_kind_of
from gqa_convert.verify.layout import Run
from gqa_convert.verify.numbers import half_unit, same_bits
from gqa_convert.verify.proofs import PROOFS, Proof
from gqa_convert.verify.report import Finding


class FoldedComparison(TensorComparison):
    """A comparison that judges what a method makes of attention by its function, and all other tensors by their bits.

    Args:
        source: SOURCE's tensors.
        out: OUT's tensors.
        geometry: of both checkpoints.
        method: factor or fit.
        family: SOURCE's family.
        config: SOURCE's config.
        progress: called with the number of OUT's bytes in each block compared.
    """

    def __init__(
        self,
        source: Weights,
        out: Weights,
        geometry: Geometry,
        method: str,
        family: Family,
        config: dict[str, Any],
        progress: Callable[[int], None],
    ) -> None:
        super().__init__(source, out, geometry, method, progress)
        self._family = family
        self._measured = PROOFS[method] is Proof.MEASURED
        self._readers = HeadReader(source, family, converted=False), HeadReader(out, family, converted=True)
        self._modules = {
            module: (attention_kind, geometry.of(module, attention_kind))
            for module, attention_kind in geometry.modules.items()
            if geometry.of(module, attention_kind).size > 1
        }
        self._constraints_of: dict[str, FoldingConstraints] = {}
        for module, (attention_kind, _) in self._modules.items():
            cut = geometry.cuts[f"{module}.{family.fused or family.key}.weight"]
            head_dim = next(run.head_dim for run in cut.runs if run.part == "key")
            self._constraints_of[module] = read_folding_constraints(
                family, config, source, module, attention_kind, head_dim
            )

    def merged(self) -> Finding:
        """What the method makes has the right types and shapes and finite numbers; what it cannot fold into is a mean;
        gains of norms are averaged, and gates are SOURCE's.
        """
        folded = [name for module in self._modules for name in self._folded_into(module)]
        problems = self._merge_problems()
        problems += [
            problem
            for name in folded
            if (problem := self._headers_differ(name, self._source.shape(name)) or self._not_finite(name))
        ]
        problems += [
            problem for module, (_, counts) in self._modules.items() for problem in self._changed_gates(module, counts)
        ]
        total = len(self._geometry.cuts) + len(self._geometry.lists) + len(folded)
        self._judge(problems, total)
        heads = f"{self._geometry.change()} K/V heads"
        return Finding("; ".join([f"{total} tensors of {self._method}, {heads}", *self._means()]), {"tensors": total})

    def functions(self, claims: dict[str, Any]) -> Finding:
        """What attention computes, against OUT's provenance record `claims`."""
        ending = f".{self._family.fused or self._family.value}.weight"
        names = {
            name.removesuffix(ending)
            for name in self._source.file_of
            if name.endswith(ending) and attention_kind_of(name, self._family)
        }
        return check_functions(self.modules(), names, self._method, claims)

    def modules(self) -> Iterator[ModuleHeads]:
        """Both checkpoints' heads of every module that was merged."""
        for module, (attention_kind, counts) in self._modules.items():
            source, merged = (reader.read(module, attention_kind, counts) for reader in self._readers)
            yield ModuleHeads(module, source, merged, self._constraints_of[module], True)

    def _means(self) -> Iterator[str]:
        """How many modules have means for keys and for values, which constraints keep the method from folding."""
        if self._measured:
            return
        for what, free in (
            ("keys", [one.keys for one in self._constraints_of.values()]),
            ("values", [one.values for one in self._constraints_of.values()]),
        ):
            if count := free.count(False):
                yield f"{what} of {count} modules are means"

    def _changed(self) -> set[str]:
        return super()._changed() | {name for module in self._modules for name in self._folded_into(module)}

    def _folded_into(self, module: str) -> Iterator[str]:
        """The tensors of a module without K/V heads that the method may change."""
        family, constraints, measured = self._family, self._constraints_of[module], self._measured
        names = [f"{module}.{family.query}.{kind}" for kind in ("weight", "bias") if constraints.keys or measured]
        names += [f"{module}.{family.output}.weight"] if constraints.values or measured else []
        names += [f"{module}.{family.output}.bias"] if measured else []
        return (name for name in names if name in self._source.file_of and name not in self._geometry.cuts)

    def _compare_kept(self, name: str, cut: Cut, run: Run, start: int) -> Iterator[str | None]:
        """Compare the queries of a fused projection, unless they may have taken over maps of keys."""
        if self._folds(name, "key"):
            return iter(())  # `functions` compares them together with the keys
        return super()._compare_kept(name, cut, run, start)

    def _compare_merged(self, name: str, cut: Cut, run: Run, start: int) -> Iterator[str | None]:
        """Compare the merged heads, which begin at row `start` in OUT."""
        counts = self._geometry.of(name, cut.attention_kind)
        if counts.size < 1:  # the heads of an encoder, repeated
            yield from super()._compare_merged(name, cut, run, start)
            return
        for group in range(counts.after):
            at = start + group * run.head_dim
            ours = self._ours(name, at, at + run.head_dim, cut.axis)
            if not bool(ours.isfinite().all()):
                yield "NaN or Inf"
            elif run.part == "norm" or not self._folds(name, run.part):
                yield _off_mean(ours, [self._head(name, cut, run, head) for head in counts.group(group)])

    def _compare_list(self, counts: Counts, names: list[str]) -> Iterator[str | None]:
        """Compare norms that have one tensor per K/V head."""
        if counts.size <= 1:
            yield from super()._compare_list(counts, names)
            return
        for group in range(counts.after):
            name = names[group]
            if problem := self._headers_differ(name, self._source.shape(name)):
                yield problem
                continue
            heads = [self._source.whole(names[head]) for head in counts.group(group)]
            problem = _off_mean(self._ours(name, 0, self._source.shape(name)[0]), heads)
            yield f"{name} in {problem}" if problem else None

    def _folds(self, name: str, part: str) -> bool:
        """Whether the method may make a part of a tensor something else than a mean."""
        constraints = self._constraints_of.get(name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[0])
        if constraints is None:
            return False
        if self._measured:
            return True
        return constraints.values if part == "value" else constraints.keys

    def _not_finite(self, name: str) -> str | None:
        ours = self._ours(name, 0, self._out.shape(name)[0])
        return None if bool(ours.isfinite().all()) else f"{name} in NaN or Inf"

    def _changed_gates(self, module: str, counts: Counts) -> Iterator[str]:
        theirs, ours = (reader.gates(module, counts) for reader in self._readers)
        for name, rows in theirs.items():
            if name not in ours or not same_bits(ours[name], rows):
                yield f"{name} in gates, which are not SOURCE's"


def _off_mean(ours: Any, heads: list[Any]) -> str | None:
    """How many numbers are not the rounded mean of several heads, in words."""
    import torch

    mean = torch.stack([head.double() for head in heads]).mean(0)
    off = (ours.double() - mean).abs() > half_unit(mean, ours.dtype) + 1e-12 * mean.abs()
    off |= ~ours.isfinite()
    return f"{int(off.sum())} number(s)" if bool(off.any()) else None
