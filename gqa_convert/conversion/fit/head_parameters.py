"""Heads as torch parameters, from which a loaded module's weights are made by differentiable indexing.

Shape legend as in `gqa_convert.merging.attention_heads`; N groups.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gqa_convert.conversion.fit.repeated_rows import RepeatedRows
from gqa_convert.merging.attention_heads import Heads, LayerLayout, Tensors, rows_first

ROLES = {"query": "queries", "key": "keys", "value": "values"}
"""The fields of `Heads` by the roles of sections."""
BIASES = {"queries": "queries_bias", "keys": "keys_bias", "values": "values_bias"}
FEWER = 0.75
"""Of the rows of a weight: where merged heads have no more, products are made of them."""

Parts = Mapping[str, Tensor]
"""The fields of `Heads` as tensors, the last column of each role of `BIASES` apart; `output_bias` is left out where
there is none.
"""


def as_parts(heads: Heads, device: Any, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The fields of heads as tensors."""
    arrays: dict[str, Any] = {}
    for field, bias in BIASES.items():
        rows = getattr(heads, field)
        arrays[field] = rows[..., :-1]
        arrays[bias] = rows[..., -1]
    arrays["outputs"] = heads.outputs
    if heads.output_bias is not None:
        arrays["output_bias"] = heads.output_bias
    return {name: torch.from_numpy(array).to(device, dtype) for name, array in arrays.items()}


def as_heads(parts: Parts) -> Heads:
    """The reverse, in float64."""
    arrays = {name: part.detach().cpu().double().numpy() for name, part in parts.items()}
    rows = {field: np.concatenate([arrays[field], arrays[bias][..., None]], -1) for field, bias in BIASES.items()}
    return Heads(**rows, outputs=arrays["outputs"], output_bias=arrays.get("output_bias"))


class Assembly:
    """From merged heads to the parameters of the source's own module, heads repeated.

    Args:
        layout: of the layer.
        source: its heads, for their shapes.
        tensors: its tensors. Gates are taken from them, and the gains of key norms, averaged over each group.
        groups: K/V heads of the result.
        device: of the module.
        repeats_products: whether products with the weights are made of merged heads and then repeated, where this saves
            at least a quarter of a projection's.
    """

    def __init__(
        self,
        layout: LayerLayout,
        source: Heads,
        tensors: Tensors,
        groups: int,
        device: Any,
        *,
        repeats_products: bool = False,
    ) -> None:
        self._prefix = f"{layout.layer.module}."
        self._transposed = layout.transposed
        self._repeats_products = repeats_products and not layout.transposed
        self._output, self._output_bias = layout.output_names
        norms = layout.merge_norms(layout.merge_norms(tensors, groups), layout.layer.kv_heads)
        self._fixed = {name: torch.from_numpy(gains.astype(np.float32)).to(device) for name, gains in norms.items()}
        self._rows: dict[str, _Rows] = {}
        heads = {"query": layout.layer.heads, "key": groups, "value": groups}
        sizes = {role: getattr(source, field).shape[-2] for role, field in ROLES.items()}
        for name, sections in layout.projections.items():
            array = rows_first(tensors[name], layout.transposed)
            index = np.full(len(array), -1)
            roles = list(dict.fromkeys(section.role for section in sections if section.role in ROLES))
            first = 0
            for role in roles:
                for section in sections:
                    if section.role != role:
                        continue
                    for number, start in enumerate(section.starts):
                        head = number * heads[role] // section.heads
                        rows = np.arange(sizes[role])
                        index[start + rows] = first + head * sizes[role] + rows
                first += heads[role] * sizes[role]
            fields = [ROLES[role] for role in roles]
            names = fields if array.ndim == 2 else [BIASES[field] for field in fields]
            self._rows[name] = _Rows.of(names, index, first, array, device)

    def __call__(self, parts: Parts) -> dict[str, Tensor]:
        """The module's parameters, by name inside it, with gradients to the parts. With `repeats_products`, some are
        `RepeatedRows`.
        """
        result: dict[str, Any] = dict(self._fixed)
        for name, rows in self._rows.items():
            weight = rows.gathered(parts, repeats_products=self._repeats_products)
            result[name] = weight.T if self._transposed and weight.dim() == 2 else weight
        columns = parts["outputs"].permute(2, 0, 1, 3).flatten(1)
        result[self._output] = columns.T if self._transposed else columns
        if "output_bias" in parts:
            result[self._output_bias] = parts["output_bias"]
        return {name.removeprefix(self._prefix): tensor for name, tensor in result.items()}


def repeated_parameters(layout: LayerLayout, tensors: Tensors, groups: int) -> dict[str, Tensor]:
    """A merged layer as the parameters of the source's module: K/V heads repeated, rounded as in the result.

    Args:
        layout: of the source's layer.
        tensors: the merged layer's, as the result has them.
        groups: its K/V heads.
    """
    prefix = f"{layout.layer.module}."
    repeated = layout.repeated(tensors, groups)
    return {name.removeprefix(prefix): torch.from_numpy(array.astype(np.float32)) for name, array in repeated.items()}


@dataclass(frozen=True, slots=True)
class _Rows:
    """A projection's weight or bias: rows of parts, and those rows of the source that do not change."""

    names: list[str]
    """Of the parts whose rows it has, one after the other; they have inputs in common."""
    index: Tensor | None
    """Which of these; None for all, as they stand."""
    taken: Tensor | None
    """Which rows of the result are taken from there; None for all."""
    fixed: Tensor | None
    """The source's tensor, rows first, unless all are taken."""

    @staticmethod
    def of(names: list[str], index: Any, count: int, own: Any, device: Any) -> "_Rows":
        """From the row of the parts, of `count`, that stands in each row of the source's tensor; -1 for its own."""
        taken = index >= 0
        rows = torch.from_numpy(np.maximum(index, 0)).to(device)
        if not taken.all():
            fixed = torch.from_numpy(own.astype(np.float32)).to(device)
            return _Rows(names, rows, torch.from_numpy(taken).to(device), fixed)
        in_order = len(index) == count and (index == np.arange(count)).all()
        return _Rows(names, None if in_order else rows, None, None)

    def gathered(self, parts: Parts, *, repeats_products: bool) -> Any:
        found = [parts[name].flatten(0, -2) if name in BIASES else parts[name].flatten() for name in self.names]
        rows = found[0] if len(found) == 1 else torch.cat(found)
        if self.index is None:
            return rows
        if self.taken is not None:
            taken = self.taken[:, None] if rows.dim() == 2 else self.taken
            return torch.where(taken, rows.index_select(0, self.index), self.fixed)
        if repeats_products and rows.dim() == 2 and len(rows) <= FEWER * len(self.index):
            return RepeatedRows(rows, self.index)
        return rows.index_select(0, self.index)
