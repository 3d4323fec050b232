"""Heads as torch parameters, from which a loaded module's weights are made by differentiable indexing.

Shape legend as in `gqa_convert.merging.attention_heads`; N groups.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gqa_convert.conversion.fit.repeated_heads import RepeatedHeads
from gqa_convert.merging.attention_heads import Heads, LayerLayout, Tensors, rows_first

ROLES = {"query": "queries", "key": "keys", "value": "values"}
"""The fields of `Heads` by the roles of sections."""
ROLES_OF_BIASES = {"query": "queries_bias", "key": "keys_bias", "value": "values_bias"}
BIASES = {"queries": "queries_bias", "keys": "keys_bias", "values": "values_bias"}

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

    The layout itself says where rows go: it merges heads whose numbers are the numbers of their rows.

    Args:
        layout: of the layer.
        tensors: its tensors. Gates are taken from them, and the gains of key norms, averaged over each group.
        groups: K/V heads of the result.
        device: of the module.
    """

    def __init__(self, layout: LayerLayout, tensors: Tensors, groups: int, device: Any) -> None:
        self._prefix = f"{layout.layer.module}."
        self._transposed, self._groups = layout.transposed, groups
        self._output, self._output_bias = layout.output_names
        norms = layout.merge_norms(layout.merge_norms(tensors, groups), layout.layer.kv_heads)
        self._fixed = {name: torch.from_numpy(gains.astype(np.float32)).to(device) for name, gains in norms.items()}
        self._rows: dict[str, tuple[list[str | Tensor], Tensor]] = {}
        """For each weight and bias the names of the parts whose rows it has, or rows of the source's; and which row of
        these, one behind the other, stands in each place."""
        self._times: dict[str, int] = {}
        """Of weights that repeat each merged head as a whole: how often."""
        numbered = _numbered_rows(layout, tensors, groups)
        for name, sections in layout.projections.items():
            roles = {section.role for section in sections}
            own = rows_first(tensors[name], layout.transposed)
            names = ROLES if own.ndim == 2 else ROLES_OF_BIASES
            sources: list[str | Tensor] = [names[role] for role in names if role in roles]
            if "gate" in roles:
                sources.append(torch.from_numpy(own.astype(np.float32)).to(device))
            index = torch.from_numpy(rows_first(numbered[name], layout.transposed).reshape(-1))
            index = index - index.min()
            self._rows[name] = sources, index.to(device)
            rows = torch.arange(int(index.max()) + 1)
            times = len(index) // len(rows)
            if own.ndim == 2 and not layout.transposed and times > 1:
                repeated = RepeatedHeads(rows[:, None], groups, times).whole()[:, 0]
                if torch.equal(index, repeated):
                    self._times[name] = times

    def __call__(self, parts: Parts) -> dict[str, Tensor]:
        """The module's parameters, by name inside it, with gradients to the parts; some are `RepeatedHeads`."""
        result: dict[str, Any] = dict(self._fixed)
        for name, (sources, index) in self._rows.items():
            rows = torch.cat([_flat(parts, source) for source in sources])
            if name in self._times:
                result[name] = RepeatedHeads(rows, self._groups, self._times[name])
                continue
            weight = rows.index_select(0, index)
            result[name] = weight.T if self._transposed and weight.dim() == 2 else weight
        columns = parts["outputs"].permute(2, 0, 1, 3).flatten(1)
        result[self._output] = columns.T if self._transposed else columns
        if "output_bias" in parts:
            result[self._output_bias] = parts["output_bias"]
        return {name.removeprefix(self._prefix): tensor for name, tensor in result.items()}


def _numbered_rows(layout: LayerLayout, tensors: Tensors, groups: int) -> Tensors:
    """The tensors that the layout makes of heads whose rows, with a column and a bias, hold their own numbers: queries
    first, then keys and values. Gates, which stand beside queries, are numbered behind these.
    """
    layer = layout.layer
    ratio = layer.heads // layer.kv_heads
    queries = np.arange(layer.heads * layer.key_head_dim).reshape(layer.kv_heads, ratio, layer.key_head_dim, 1)
    keys = queries.size + np.arange(groups * layer.key_head_dim).reshape(groups, -1, 1)
    values = queries.size + keys.size + np.arange(groups * layer.value_head_dim).reshape(groups, -1, 1)
    outputs = np.zeros((layer.kv_heads, ratio, 1, layer.value_head_dim))
    heads = Heads(queries.repeat(2, -1), keys.repeat(2, -1), values.repeat(2, -1), outputs, output_bias=None)
    numbers = {layout.output_names[0]: np.zeros((1, 1), np.int64)}
    for name in layout.projections:
        rows = rows_first(tensors[name], layout.transposed)
        own = np.arange(len(rows)).reshape(-1, *[1] * (rows.ndim - 1))
        numbers[name] = rows_first(queries.size + own, layout.transposed)
    return layout.merge_heads(heads, tensors | numbers, layer.kv_heads)


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
