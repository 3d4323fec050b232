"""Heads as torch parameters, from which a loaded module's weights are made by differentiable indexing.

Shape legend as in `gqa_convert.merging.attention_heads`; N groups.
"""

from collections.abc import Mapping
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


def as_parts(heads: Heads, device: Any) -> dict[str, Tensor]:
    """The fields of heads as tensors."""
    arrays: dict[str, Any] = {}
    for field, bias in BIASES.items():
        rows = getattr(heads, field)
        arrays[field] = rows[..., :-1]
        arrays[bias] = rows[..., -1]
    arrays["outputs"] = heads.outputs
    if heads.output_bias is not None:
        arrays["output_bias"] = heads.output_bias
    return {name: torch.from_numpy(array).to(device, torch.float32) for name, array in arrays.items()}


def as_heads(parts: Parts) -> Heads:
    """The reverse, in float64."""
    arrays = {name: part.detach().cpu().double().numpy() for name, part in parts.items()}
    rows = {field: np.concatenate([arrays[field], arrays[bias][..., None]], -1) for field, bias in BIASES.items()}
    return Heads(**rows, outputs=arrays["outputs"], output_bias=arrays.get("output_bias"))


class Assembly:
    """From merged heads to the parameters of the source's own module, heads repeated.

    Args:
        layout: of the layer.
        tensors: its tensors. Gates are taken from them, and the gains of key norms, averaged over each group.
        groups: K/V heads of the result.
        device: of the module.
        repeats_products: whether products with the weights are made of merged heads and then repeated, where this saves
            at least a quarter of a projection's.
    """

    def __init__(
        self,
        layout: LayerLayout,
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
        self._rows: dict[str, tuple[list[str | Tensor], Tensor]] = {}
        """For each weight and bias the names of the parts that it has rows of, or rows of the source's; and which row of
        these, one behind the other, stands in each place."""
        self._is_in_order: dict[str, bool] = {}
        self._groups = groups
        self._has_blocks: dict[str, bool] = {}
        """Whether each holds the heads of one role and nothing else, in their order."""
        counts = {"query": layout.layer.heads, "key": groups, "value": groups}
        for name, sections in layout.projections.items():
            own = rows_first(tensors[name], layout.transposed)
            index = torch.empty(len(own), dtype=torch.long)
            sources: list[str | Tensor] = []
            first = 0
            for section in sections:
                count = counts.get(section.role, section.heads)
                rows = torch.arange(section.head_rows)
                for number, start in enumerate(section.starts):
                    head = number * count // section.heads
                    index[start + rows] = first + head * section.head_rows + rows
                first += count * section.head_rows
                if section.role in ROLES:
                    field = ROLES[section.role]
                    sources.append(field if own.ndim == 2 else BIASES[field])
                else:
                    gates = [own[start : start + section.head_rows] for start in section.starts]
                    sources.append(torch.from_numpy(np.concatenate(gates).astype(np.float32)).to(device))
            self._rows[name] = sources, index.to(device)
            self._is_in_order[name] = torch.equal(index, torch.arange(first))
            one_by_one = range(0, len(own), sections[0].head_rows)
            self._has_blocks[name] = len(sections) == 1 and list(sections[0].starts) == list(one_by_one)

    def __call__(self, parts: Parts) -> dict[str, Tensor]:
        """The module's parameters, by name inside it, with gradients to the parts. With `repeats_products`, some are
        `RepeatedRows`.
        """
        result: dict[str, Any] = dict(self._fixed)
        for name, (sources, index) in self._rows.items():
            found = [_flat(parts, source) for source in sources]
            rows = found[0] if len(found) == 1 else torch.cat(found)
            if self._repeats_products and rows.dim() == 2 and len(rows) <= FEWER * len(index):
                result[name] = RepeatedRows(rows, index, self._groups if self._has_blocks[name] else None)
                continue
            weight = rows if self._is_in_order[name] else rows.index_select(0, index)
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


def _flat(parts: Parts, source: str | Tensor) -> Tensor:
    """Rows of a weight [n, d], or of a bias [n]."""
    if isinstance(source, Tensor):
        return source
    return parts[source].flatten(0, -2) if source in BIASES else parts[source].flatten()
