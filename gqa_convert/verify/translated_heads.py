"""Attention of a translated OUT whose queries and outputs have absorbed maps of keys and values, taken back to SOURCE's
inputs.

There the norm in front has its gain and bias, queries are not scaled, and heads can be compared with SOURCE's as
functions. Shape legend as in `heads`.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

from gqa_convert.verify.checkpoint_reader import Weights
from gqa_convert.verify.folded_functions import Module, check_functions
from gqa_convert.verify.folding_constraints import FoldingConstraints, rotary_pairs
from gqa_convert.verify.heads import Heads, rounding
from gqa_convert.verify.proofs import Proof, proof_of
from gqa_convert.verify.report import Failure
from gqa_convert.verify.rewriting import ROLES, Expected, Layer, Rewriting, split_heads, to_pairs
from gqa_convert.verify.translated_tensors import TranslatedComparison


class TranslatedHeads:
    """Reads both checkpoints' heads, rotary rows in OUT's order.

    Args:
        rewriting: of SOURCE to OUT's type.
        out: tensors of OUT.
    """

    def __init__(self, rewriting: Rewriting, out: Weights) -> None:
        self.rewriting = rewriting
        self._out = out

    def module(self, number: int) -> str:
        """SOURCE's name of a layer's attention."""
        return f"{self.rewriting.layer(number).old}{self.rewriting.target_architecture.old.attention}"

    def modules(self) -> Iterator[Module]:
        """Every layer's heads."""
        pairs = rotary_pairs(self.rewriting.sizes.rotated, interleaved=False)
        for number in range(self.rewriting.sizes.layers):
            layer = self.rewriting.layer(number)
            whole = bool((self._gain(layer) != 0).all())
            yield (
                self.module(number),
                self._source(layer),
                self.merged(layer),
                FoldingConstraints(True, True, pairs),
                whole,
            )

    def names(self, layer: Layer) -> dict[str, tuple[str, int, int]]:
        """OUT's tensors, without `.weight` and `.bias`, with the rows that hold each role: from where, and how many."""
        target_architecture, sizes = self.rewriting.target_architecture, self.rewriting.sizes
        stem = f"{layer.new}{target_architecture.new.attention}"
        rows = {role: (sizes.heads if role == "query" else self.rewriting.groups) * sizes.width for role in ROLES}
        if len(target_architecture.new.heads) == 1:
            starts = (0, rows["query"], rows["query"] + rows["key"])
            found = {
                role: (f"{stem}.{target_architecture.new.heads[0]}", start, rows[role])
                for role, start in zip(ROLES, starts, strict=True)
            }
        else:
            found = {
                role: (f"{stem}.{name}", 0, rows[role])
                for role, name in zip(ROLES, target_architecture.new.heads, strict=True)
            }
        return found | {"output": (f"{stem}.{target_architecture.new.output}", 0, sizes.hidden)}

    def _gain(self, layer: Layer) -> Any:
        import torch

        if not self.rewriting.target_architecture.folded:
            return torch.ones(self.rewriting.sizes.hidden, dtype=torch.float64)
        return self.rewriting.whole(f"{layer.norm}.weight").double()

    def _source(self, layer: Layer) -> Heads:
        import torch

        whole, target_architecture, sizes = self.rewriting, self.rewriting.target_architecture, self.rewriting.sizes
        found = []
        for role in ROLES:
            weight = layer.heads(role, "weight").double()
            bias = layer.heads(role, "bias").double() if whole.biased else weight.new_zeros(weight.shape[:2])
            found.append(torch.cat([weight, bias[:, :, None]], 2))
        output = whole.whole(f"{layer.old}{target_architecture.old.attention}.{target_architecture.old.output}.weight")
        columns = (
            (output.T if target_architecture.conv else output).double().unflatten(1, (sizes.heads, -1)).transpose(0, 1)
        )
        noise = {"query": found[0][:, None, :, 0] * 0, "key": found[1][:, :, 0] * 0, "value": found[2][:, :, 0] * 0}
        return Heads(
            found[0][:, None], found[1], found[2], columns[:, None], noise | {"output": columns[:, None, 0] * 0}
        )

    def merged(self, layer: Layer) -> Heads:
        """OUT's heads of a layer."""
        import torch

        sizes, groups = self.rewriting.sizes, self.rewriting.groups
        found, noise = {}, {}
        for role in ROLES:
            rows, off = self._unfolded(layer, role)
            count = sizes.heads if role == "query" else groups
            found[role], noise[role] = rows.unflatten(0, (count, -1)), off.unflatten(0, (count, -1))
        name = self.names(layer)["output"][0]
        output = self._rows(f"{name}.weight", 0, sizes.hidden)
        columns = output.double().unflatten(1, (sizes.heads, -1)).transpose(0, 1)
        off = rounding(columns, output.dtype).square().sum(1)
        queries = found["query"].unflatten(0, (groups, -1)), noise["query"].unflatten(0, (groups, -1))
        split = (torch.unflatten(one, 0, (groups, -1)) for one in (columns, off))
        outputs = tuple(split)
        return Heads(
            queries[0],
            found["key"],
            found["value"],
            outputs[0],
            {"query": queries[1], "key": noise["key"], "value": noise["value"], "output": outputs[1]},
        )

    def _rows(self, name: str, start: int, count: int) -> Any:
        return self._out.rows(name, start, start + count)

    def _unfolded(self, layer: Layer, role: str) -> tuple[Any, Any]:
        """Rows [rows, e] of a role before the norm was folded in, and what rounding may have done to each, squared and
        summed.

        Numbers were rounded twice: as SOURCE's merged heads, and as OUT's rows.
        """
        import torch

        name, start, count = self.names(layer)[role]
        weight, bias = (self._rows(f"{name}.{kind}", start, count) for kind in ("weight", "bias"))
        scale = layer.scale if role == "query" else 1.0
        gain = self._gain(layer) * scale
        shift = (
            self.rewriting.whole(f"{layer.norm}.bias").double()
            if self.rewriting.target_architecture.folded
            else torch.zeros_like(gain)
        )
        kept = gain != 0
        divisor = torch.where(kept, gain, 1.0)
        rows = torch.where(kept, weight.double() / divisor, 0.0)
        off = torch.where(
            kept, rounding(weight.double(), weight.dtype) / divisor.abs() + rounding(rows, weight.dtype), 0.0
        )
        column = bias.double() / scale - rows @ shift
        column_off = rounding(bias.double(), bias.dtype).square() / scale**2 + rounding(column, bias.dtype).square()
        column_off += off.square() @ shift.square()
        return torch.cat([rows, column[:, None]], 1), off.square().sum(1) + column_off

    def replace(self, model: Any) -> int:
        """Give the loaded SOURCE OUT's queries, outputs and, each as often as its group has heads, keys and values."""
        import torch

        target_architecture, sizes = self.rewriting.target_architecture, self.rewriting.sizes
        pattern = re.compile(
            rf"(?:.*\.)?{target_architecture.old.layers}\.(\d+)\.{target_architecture.old.attention}\.([^.]+)\.(weight|bias)"
        )
        layers: dict[int, dict[str, Any]] = {}
        replaced = 0
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                found = pattern.fullmatch(name)
                if found is None or found[2] not in (*target_architecture.old.heads, target_architecture.old.output):
                    continue
                layer = self.rewriting.layer(int(found[1]))
                replaced += 1
                if found[2] == target_architecture.old.output:
                    own = self.names(layer)["output"][0]
                    theirs = self._rows(f"{own}.{found[3]}", 0, sizes.hidden)
                    parameter.copy_(theirs.T if target_architecture.conv and theirs.dim() == 2 else theirs)
                    continue
                rows = layers.setdefault(int(found[1]), self._in_sources_order(layer))
                part = slice(-1) if found[3] == "weight" else -1
                if target_architecture.layout == "alone":
                    role = ROLES[target_architecture.old.heads.index(found[2])]
                    parameter.copy_(rows[role][:, :, part].reshape(parameter.shape))
                    continue
                for role, view in split_heads(target_architecture, parameter, sizes.heads).items():
                    view.copy_(rows[role][:, :, part].reshape(view.shape))
        if not replaced:
            raise Failure("the loaded SOURCE has no parameters of attention")
        return replaced

    def _in_sources_order(self, layer: Layer) -> dict[str, Any]:
        """[heads, rows, e] of each role."""
        sizes = self.rewriting.sizes
        merged = self.merged(layer).regrouped(sizes.heads)
        found = {"query": merged.queries[:, 0], "key": merged.keys, "value": merged.values}
        turned = ("query", "key") if self.rewriting.target_architecture.interleaved else ()
        return {role: to_pairs(rows, sizes.rotated) if role in turned else rows for role, rows in found.items()}


class FoldedTranslatedComparison(TranslatedComparison):
    """A comparison that leaves what the method makes of attention to its function.

    Args:
        rewriting: what OUT must hold besides.
        out: tensors of OUT.
        progress: called with every number of bytes of OUT compared.
        heads: of both.
    """

    def __init__(
        self, rewriting: Rewriting, out: Weights, progress: Callable[[int], None], heads: TranslatedHeads
    ) -> None:
        super().__init__(rewriting, out, progress)
        self._heads = heads
        self._made: set[str] = set()
        for number in range(rewriting.sizes.layers):
            for role, (name, _, _) in heads.names(rewriting.layer(number)).items():
                self._made.add(f"{name}.weight")
                changed = (
                    proof_of(rewriting.method) is Proof.MEASURED
                    if role == "output"
                    else rewriting.biased or rewriting.target_architecture.folded
                )
                self._made.update({f"{name}.bias"} if changed else ())

    def _compare(self, name: str, formula: Callable[[], Expected], group: bool) -> str | None:
        if name not in self._made or name not in self._out.file_of:
            return super()._compare(name, formula, group)
        expected, shape = formula(), self._out.shape(name)
        if shape != tuple(expected.value.shape) or self._out.dtype(name) != expected.dtype:
            return f"is {list(shape)} of {self._out.dtype(name)} where {list(expected.value.shape)} of {expected.dtype} belongs"
        ours = self._out.rows(name, 0, shape[0])
        self._progress(ours.numel() * ours.itemsize)
        return None if bool(ours.isfinite().all()) else "holds NaN or Inf"

    def merged(self) -> str:
        """Types, shapes and finite numbers of what the method makes; looks at all other tensors too, for
        `rewritten`.
        """
        super().merged()
        rewriting = self._rewriting
        return (
            f"{len(self._made)} tensors of {rewriting.method}, {rewriting.sizes.heads} -> {rewriting.groups} K/V heads"
        )

    def functions(self, claimed: Any, orders: Any = None) -> str:
        """What attention computes, on SOURCE's inputs.

        Args:
            claimed: merge errors in OUT's provenance.
            orders: of SOURCE's K/V heads, likewise.
        """
        names = {self._heads.module(number) for number in range(self._rewriting.sizes.layers)}
        return check_functions(self._heads.modules(), names, str(self._rewriting.method), claimed, orders)
