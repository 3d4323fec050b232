"""The checks on tensors where queries and outputs have absorbed maps of keys and values: what may differ from SOURCE,
and what not.
"""

from collections.abc import Callable, Iterator
from typing import Any

from gqa_convert.families.table import Family
from gqa_convert.verify.checkpoint_reader import Weights
from gqa_convert.verify.folded_functions import Module, check_functions
from gqa_convert.verify.folding_constraints import FoldingConstraints, read_folding_constraints
from gqa_convert.verify.geometry import Counts, Cut, Geometry, attention_kind_of
from gqa_convert.verify.heads import HeadReader
from gqa_convert.verify.layout import Run
from gqa_convert.verify.proofs import PROOFS, Proof
from gqa_convert.verify.recomputed_merges import half_unit, same_bits
from gqa_convert.verify.tensors import TensorComparison


class FoldedComparison(TensorComparison):
    """A comparison that leaves what a method makes of attention to its function, and holds all else to SOURCE's bits.

    Args:
        source: tensors of SOURCE.
        out: tensors of OUT.
        geometry: of both.
        method: align, factor or fit.
        family: of SOURCE.
        config: SOURCE's.
        progress: called with every number of bytes of OUT compared.
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
        super().__init__(source, out, geometry, method, 0, progress)
        self._family = family
        self._readers = HeadReader(source, family, converted=False), HeadReader(out, family, converted=True)
        self._modules = {
            module: (attention_kind, geometry.counts[attention_kind])
            for module, attention_kind in geometry.modules.items()
            if geometry.counts[attention_kind].size > 1
        }
        self._constraints_of: dict[str, FoldingConstraints] = {}
        for module, (attention_kind, _) in self._modules.items():
            cut = geometry.cuts[f"{module}.{family.fused or family.key}.weight"]
            width = next(run.width for run in cut.runs if run.part == "key")
            self._constraints_of[module] = read_folding_constraints(
                family, config, source, module, attention_kind, width
            )

    def _changed(self) -> set[str]:
        return super()._changed() | {name for module in self._modules for name in self._folding(module)}

    def _folding(self, module: str) -> Iterator[str]:
        """Tensors without K/V heads that the method may change in a module."""
        family, constraints, free = self._family, self._constraints_of[module], PROOFS[self._method] is Proof.MEASURED
        names = [f"{module}.{family.query}.{kind}" for kind in ("weight", "bias") if constraints.keys or free]
        names += [f"{module}.{family.output}.weight"] if constraints.values or free else []
        names += [f"{module}.{family.output}.bias"] if free else []
        return (name for name in names if name in self._source.file_of and name not in self._geometry.cuts)

    def merged(self) -> str:
        """Types, shapes and finite numbers of what a method makes; means of what it can't; gains of norms averaged;
        gates SOURCE's.
        """
        problems = [problem for name, cut in self._geometry.cuts.items() if (problem := self._compare_cut(name, cut))]
        for attention_kind, names in self._geometry.lists:
            problems += [
                problem for problem in self._compare_list(self._geometry.counts[attention_kind], names) if problem
            ]
        made = [name for module in self._modules for name in self._folding(module)]
        problems += [
            problem
            for name in made
            if (problem := self._headers_differ(name, self._source.shape(name)) or self._infinite(name))
        ]
        problems += [
            problem for module, (_, counts) in self._modules.items() for problem in self._other_gates(module, counts)
        ]
        total = len(self._geometry.cuts) + len(self._geometry.lists) + len(made)
        self._judge(problems, total)
        means = {
            what: sum(1 for one in self._constraints_of.values() if not getattr(one, what))
            for what in ("keys", "values")
        }
        notes = [
            f"{what} of {count} modules are means"
            for what, count in means.items()
            if count and PROOFS[self._method] is not Proof.MEASURED
        ]
        return "; ".join(
            [f"{total} tensors of {self._method}, {self._geometry.before} -> {self._geometry.after} K/V heads", *notes]
        )

    def functions(self, claimed: Any, orders: Any = None) -> str:
        """What attention computes.

        Args:
            claimed: merge errors in OUT's provenance.
            orders: of SOURCE's K/V heads, likewise.
        """
        ending = f".{self._family.fused or self._family.value}.weight"
        names = {
            name.removesuffix(ending)
            for name in self._source.file_of
            if name.endswith(ending) and attention_kind_of(name, self._family)
        }
        return check_functions(self._read_modules(), names, self._method, claimed, orders)

    def _read_modules(self) -> Iterator[Module]:
        for module, (attention_kind, counts) in self._modules.items():
            source, merged = (reader.read(module, attention_kind, counts) for reader in self._readers)
            yield module, source, merged, self._constraints_of[module], True

    def _compare_kept(self, name: str, cut: Cut, run: Run, at: int) -> Iterator[str | None]:
        """The queries of a fused projection, which may have absorbed maps."""
        if self._free(name, "key"):
            return iter(())  # looked at with the keys
        return super()._compare_kept(name, cut, run, at)

    def _compare_merged(self, name: str, cut: Cut, run: Run, at: int, fresh: Any) -> Iterator[str | None]:
        """The merged heads from `at` on in OUT."""
        counts = self._geometry.counts[cut.attention_kind]
        if counts.size < 1:  # an encoder's, repeated
            yield from super()._compare_merged(name, cut, run, at, fresh)
            return
        for group in range(counts.after):
            start = at + group * run.width
            ours = self._out.rows(name, start, start + run.width, cut.axis)
            self._progress(ours.numel() * ours.itemsize)
            if not bool(ours.isfinite().all()):
                yield "NaN or Inf"
            elif run.part == "norm" or not self._free(name, run.part):
                heads = range(group * counts.size, (group + 1) * counts.size)
                yield _off_mean(ours, [self._head(name, cut, run, head) for head in heads])

    def _compare_list(self, counts: Counts, names: list[str]) -> Iterator[str | None]:
        """Norms that have one tensor per head."""
        if counts.size <= 1:
            yield from super()._compare_list(counts, names)
            return
        for group in range(counts.after):
            name = names[group]
            if problem := self._headers_differ(name, self._source.shape(name)):
                yield problem
                continue
            size = self._source.shape(name)[0]
            own = names[group * counts.size : (group + 1) * counts.size]
            problem = _off_mean(self._out.rows(name, 0, size), [self._source.rows(one, 0, size) for one in own])
            yield f"{name} in {problem}" if problem else None

    def _free(self, name: str, part: str) -> bool:
        """Whether the method may make a part of a tensor of anything but its mean."""
        constraints = self._constraints_of.get(name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[0])
        if constraints is None:
            return False
        if PROOFS[self._method] is Proof.MEASURED:
            return True
        return constraints.values if part == "value" else constraints.keys

    def _infinite(self, name: str) -> str | None:
        ours = self._out.rows(name, 0, self._out.shape(name)[0])
        self._progress(ours.numel() * ours.itemsize)
        return None if bool(ours.isfinite().all()) else f"{name} in NaN or Inf"

    def _other_gates(self, module: str, counts: Counts) -> Iterator[str]:
        theirs, ours = (reader.gates(module, counts) for reader in self._readers)
        for name, rows in theirs.items():
            if name not in ours or not same_bits(ours[name], rows):
                yield f"{name} in gates, which are not SOURCE's"


def _off_mean(ours: Any, heads: list[Any]) -> str | None:
    """How many numbers are not the rounded mean of several heads."""
    import torch

    mean = torch.stack([head.double() for head in heads]).mean(0)
    off = (ours.double() - mean).abs() > half_unit(mean, ours.dtype) + 1e-12 * mean.abs()
    off |= ~ours.isfinite()
    return f"{int(off.sum())} number(s)" if bool(off.any()) else None
