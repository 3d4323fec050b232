"""The heads of a translated OUT into whose queries and outputs maps are folded, taken back to SOURCE's inputs.

There the norm before attention has its gain and bias, and queries are not scaled, so that heads can be compared with
SOURCE's as functions. Shape legend as in `folded.heads`.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from gqa_convert.verify.checkpoint_reader import Weights
from gqa_convert.verify.folded.constraints import FoldingConstraints, rotary_pairs
from gqa_convert.verify.folded.heads import Heads
from gqa_convert.verify.folded.modules import ModuleHeads, check_functions
from gqa_convert.verify.numbers import rounding
from gqa_convert.verify.proofs import Proof, proof_of
from gqa_convert.verify.report import Failure, Finding
from gqa_convert.verify.translated.layer import Layer
from gqa_convert.verify.translated.rewriting import Rewriting
from gqa_convert.verify.translated.source_heads import ROLES, split_heads, to_pairs
from gqa_convert.verify.translated.source_tensors import Formula
from gqa_convert.verify.translated.tensors import Compared, TranslatedComparison


@dataclass(frozen=True, slots=True)
class Rows:
    """A range of rows of OUT's tensors."""

    module: str
    """The tensors' name without `.weight` and `.bias`."""
    start: int
    count: int


class TranslatedHeads:
    """Reads both checkpoints' heads, with rotary rows in OUT's order.

    Args:
        rewriting: the translation of SOURCE.
        out: OUT's tensors.
    """

    def __init__(self, rewriting: Rewriting, out: Weights) -> None:
        self.rewriting = rewriting
        self._out = out

    def module(self, number: int) -> str:
        """SOURCE's name of a layer's attention."""
        return f"{self.rewriting.layer(number).old}{self.rewriting.target.old.attention}"

    def modules(self) -> Iterator[ModuleHeads]:
        """The heads of every layer."""
        constraints = FoldingConstraints(True, True, rotary_pairs(self.rewriting.sizes.rotary_dim, interleaved=False))
        for number in range(self.rewriting.sizes.layers):
            layer = self.rewriting.layer(number)
            complete = bool((self._gain(layer) != 0).all())
            yield ModuleHeads(self.module(number), self._source(layer), self.merged(layer), constraints, complete)

    def rows(self, layer: Layer) -> dict[str, Rows]:
        """Where OUT holds each role."""
        new, sizes = self.rewriting.target.new, self.rewriting.sizes
        stem = f"{layer.new}{new.attention}"
        counts = {role: (sizes.heads if role == "query" else self.rewriting.groups) * sizes.head_dim for role in ROLES}
        if len(new.heads) == 1:
            starts = (0, counts["query"], counts["query"] + counts["key"])
            found = {
                role: Rows(f"{stem}.{new.heads[0]}", start, counts[role])
                for role, start in zip(ROLES, starts, strict=True)
            }
        else:
            found = {role: Rows(f"{stem}.{name}", 0, counts[role]) for role, name in zip(ROLES, new.heads, strict=True)}
        return found | {"output": Rows(f"{stem}.{new.output}", 0, sizes.hidden_size)}

    def _gain(self, layer: Layer) -> Any:
        """The gain that was folded into the projections; ones where none was."""
        import torch

        if not self.rewriting.target.folded:
            return torch.ones(self.rewriting.sizes.hidden_size, dtype=torch.float64)
        return self.rewriting.whole(f"{layer.norm}.weight").double()

    def _source(self, layer: Layer) -> Heads:
        """SOURCE's heads of a layer, which are exact."""
        import torch

        source, target, sizes = self.rewriting, self.rewriting.target, self.rewriting.sizes
        found = {}
        for role in ROLES:
            weight = layer.heads(role, "weight").double()
            bias = layer.heads(role, "bias").double() if source.biased else weight.new_zeros(weight.shape[:2])
            found[role] = torch.cat([weight, bias[:, :, None]], 2)
        output = source.whole(f"{layer.old}{target.old.attention}.{target.old.output}.weight")
        columns = (output.T if target.conv else output).double().unflatten(1, (sizes.heads, -1)).transpose(0, 1)
        queries, outputs = found["query"][:, None], columns[:, None]
        exact = {"query": queries, "key": found["key"], "value": found["value"]}
        noise = {role: torch.zeros_like(heads[..., 0]) for role, heads in exact.items()}
        return Heads(
            queries, found["key"], found["value"], outputs, noise | {"output": torch.zeros_like(outputs[:, :, 0])}
        )

    def merged(self, layer: Layer) -> Heads:
        """OUT's heads of a layer."""
        sizes, groups = self.rewriting.sizes, self.rewriting.groups
        found, noise = {}, {}
        for role in ROLES:
            rows, off = self._unfolded(layer, role)
            count = sizes.heads if role == "query" else groups
            found[role], noise[role] = rows.unflatten(0, (count, -1)), off.unflatten(0, (count, -1))
        where = self.rows(layer)["output"]
        output = self._out.rows(f"{where.module}.weight", where.start, where.start + where.count)
        found["output"] = output.double().unflatten(1, (sizes.heads, -1)).transpose(0, 1)
        noise["output"] = rounding(found["output"], output.dtype).square().sum(1)
        for role in ("query", "output"):
            found[role], noise[role] = (one.unflatten(0, (groups, -1)) for one in (found[role], noise[role]))
        return Heads(found["query"], found["key"], found["value"], found["output"], noise)

    def _unfolded(self, layer: Layer, role: str) -> tuple[Any, Any]:
        """The rows [rows, e] of a role before the norm was folded in, and the squared error that rounding may have made
        in each, summed.

        The numbers were rounded twice: as SOURCE's merged heads, and as OUT's rows.
        """
        import torch

        where = self.rows(layer)[role]
        weight, bias = (
            self._out.rows(f"{where.module}.{kind}", where.start, where.start + where.count)
            for kind in ("weight", "bias")
        )
        scale = layer.scale if role == "query" else 1.0
        gain = self._gain(layer) * scale
        shift = torch.zeros_like(gain)
        if self.rewriting.target.folded:
            shift = self.rewriting.whole(f"{layer.norm}.bias").double()
        kept = gain != 0
        divisor = torch.where(kept, gain, 1.0)
        rows = torch.where(kept, weight.double() / divisor, 0.0)
        off = rounding(weight.double(), weight.dtype) / divisor.abs() + rounding(rows, weight.dtype)
        off = torch.where(kept, off, 0.0)
        column = bias.double() / scale - rows @ shift
        column_off = rounding(bias.double(), bias.dtype).square() / scale**2 + rounding(column, bias.dtype).square()
        column_off += off.square() @ shift.square()
        return torch.cat([rows, column[:, None]], 1), off.square().sum(1) + column_off

    def replace(self, model: Any) -> int:
        """Give the loaded SOURCE OUT's queries and outputs, and OUT's keys and values repeated to SOURCE's heads.

        Returns:
            How many parameters changed.
        """
        import torch

        old = self.rewriting.target.old
        pattern = re.compile(rf"(?:.*\.)?{old.layers}\.(\d+)\.{old.attention}\.([^.]+)\.(weight|bias)")
        read: dict[int, dict[str, Any]] = {}
        replaced = 0
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                found = pattern.fullmatch(name)
                if found is None or found[2] not in (*old.heads, old.output):
                    continue
                number = int(found[1])
                replaced += 1
                if found[2] == old.output:
                    self._replace_output(parameter, number, found[3])
                    continue
                if number not in read:
                    read[number] = self._in_sources_order(self.rewriting.layer(number))
                self._replace_heads(parameter, read[number], found[2], found[3])
        if not replaced:
            raise Failure("the loaded SOURCE has no parameters of attention")
        return replaced

    def _replace_output(self, parameter: Any, number: int, kind: str) -> None:
        where = self.rows(self.rewriting.layer(number))["output"]
        ours = self._out.rows(f"{where.module}.{kind}", where.start, where.start + where.count)
        parameter.copy_(ours.T if self.rewriting.target.conv and ours.dim() == 2 else ours)

    def _replace_heads(self, parameter: Any, heads: dict[str, Any], projection: str, kind: str) -> None:
        target = self.rewriting.target
        part = slice(-1) if kind == "weight" else -1
        if target.layout == "separate":
            role = ROLES[target.old.heads.index(projection)]
            parameter.copy_(heads[role][:, :, part].reshape(parameter.shape))
            return
        for role, view in split_heads(target, parameter, self.rewriting.sizes.heads).items():
            view.copy_(heads[role][:, :, part].reshape(view.shape))

    def _in_sources_order(self, layer: Layer) -> dict[str, Any]:
        """OUT's heads [heads, rows, e] of each role, rotary rows in SOURCE's order."""
        sizes = self.rewriting.sizes
        merged = self.merged(layer).regrouped(sizes.heads)
        found = {"query": merged.queries[:, 0], "key": merged.keys, "value": merged.values}
        if self.rewriting.target.interleaved:
            found |= {role: to_pairs(found[role], sizes.rotary_dim) for role in ("query", "key")}
        return found


class FoldedTranslatedComparison(TranslatedComparison):
    """A comparison that judges what the method makes of attention by its function.

    Args:
        rewriting: the formulas of OUT's other tensors.
        out: OUT's tensors.
        progress: called with the number of bytes of each tensor compared.
        heads: both checkpoints' heads.
    """

    def __init__(
        self, rewriting: Rewriting, out: Weights, progress: Callable[[int], None], heads: TranslatedHeads
    ) -> None:
        super().__init__(rewriting, out, progress)
        self._heads = heads
        self._made: set[str] = set()
        """Tensors of OUT that the method makes."""
        biases = rewriting.biased or rewriting.target.folded
        for number in range(rewriting.sizes.layers):
            for role, where in heads.rows(rewriting.layer(number)).items():
                self._made.add(f"{where.module}.weight")
                if proof_of(rewriting.method) is Proof.MEASURED if role == "output" else biases:
                    self._made.add(f"{where.module}.bias")

    def _compare(self, name: str, formula: Formula, group: Compared) -> str | None:
        if name not in self._made or name not in self._out.file_of:
            return super()._compare(name, formula, group)
        if problem := self._header_differs(name, formula()):
            return problem
        return None if bool(self._read(name).isfinite().all()) else "holds NaN or Inf"

    def merged(self) -> Finding:
        """What the method makes has the right types and shapes and finite numbers. The other tensors are compared too,
        for `rewritten`.
        """
        super().merged()
        rewriting = self._rewriting
        return Finding(
            f"{len(self._made)} tensors of {rewriting.method}, {rewriting.sizes.heads} -> {rewriting.groups} K/V heads",
            {"tensors": len(self._made)},
        )

    def functions(self, claims: dict[str, Any]) -> Finding:
        """What attention computes on SOURCE's inputs, against OUT's provenance record `claims`."""
        names = {self._heads.module(number) for number in range(self._rewriting.sizes.layers)}
        return check_functions(self._heads.modules(), names, str(self._rewriting.method), claims)
