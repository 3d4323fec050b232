"""Heads as torch parameters, put together into a loaded module's weights by differentiable indexing.

Shape legend as in `gqa_convert.merging.attention_heads`; N groups.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gqa_convert.conversion.fit.repeated_rows import RepeatedRows
from gqa_convert.errors import UnsupportedFamilyError
from gqa_convert.merging.attention_heads import Heads, LayerLayout, Tensors

FEWER = 0.75
"""Of the rows of a weight: where merged heads have no more, products are made of them."""
ROLES = ("queries", "keys", "values", "outputs", "output_bias")
BIASES = {"queries": "queries_bias", "keys": "keys_bias", "values": "values_bias"}
Parts = Mapping[str, Tensor]
"""The fields of `Heads` as tensors, the last column of each role of `BIASES` apart; `output_bias` is left out where
there is none.
"""


def as_parts(heads: Heads, device: Any, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The fields of heads as tensors."""
    found: dict[str, Any] = {}
    for role in ROLES:
        array = getattr(heads, role)
        if role in BIASES:
            found |= {role: array[..., :-1], BIASES[role]: array[..., -1]}
        elif array is not None:
            found[role] = array
    return {name: torch.from_numpy(array).to(device, dtype) for name, array in found.items()}


def as_heads(parts: Parts) -> Heads:
    """The reverse, in float64."""
    arrays = {name: tensor.detach().cpu().numpy() for name, tensor in parts.items()}
    found: dict[str, Any] = dict.fromkeys(ROLES)
    for role in ROLES:
        if BIASES.get(role) in arrays:
            found[role] = np.concatenate([arrays[role], arrays[BIASES[role]][..., None]], axis=-1, dtype=np.float64)
        elif role in arrays:
            found[role] = arrays[role].astype(np.float64)
    return Heads(**found)


class Assembly:
    """From merged heads to the parameters of the source's own module, heads repeated.

    Which row of which tensor is which row of which head is found by sending row numbers through the layout's own code.

    Args:
        layer: the tensors of the layer.
        source: its heads, for their shapes.
        tensors: its tensors, whose gains of key norms are averaged over each group.
        groups: K/V heads of the result.
        device: of the module.
        repeats_products: whether products with the weights are made of merged heads and then repeated, where this saves
            at least a quarter of a projection's.

    Raises:
        UnsupportedFamilyError: a tensor's numbers lie otherwise than rows and columns of heads do.
    """

    def __init__(
        self,
        layer: LayerLayout,
        source: Heads,
        tensors: Tensors,
        groups: int,
        device: Any,
        *,
        repeats_products: bool = False,
    ) -> None:
        shapes = {
            "queries": source.queries.shape[:3],
            "keys": (groups, source.keys.shape[1]),
            "values": (groups, source.values.shape[1]),
        }
        self._counts = {role: int(np.prod(shape)) for role, shape in shapes.items()}
        numbers: dict[str, Any] = {}
        count = 1  # a row's number is negative in the column of its bias
        for role, shape in shapes.items():
            rows = np.arange(count, count + self._counts[role], dtype=np.float64).reshape(shape)
            numbers[role] = np.stack([rows, -rows], axis=-1)
            count += self._counts[role]
        heads, ratio, _, head_dim = source.outputs.shape
        columns = np.arange(heads * ratio * head_dim, dtype=np.float64).reshape(heads, ratio, 1, head_dim)
        bias = None if source.output_bias is None else np.zeros(1)
        marked = layer.merge_heads(Heads(**numbers, outputs=columns, output_bias=bias), layer.narrowed(tensors), groups)
        marked = layer.repeated(marked, groups)
        self._module = layer.layer.module
        self._repeats_products = repeats_products and not layer.transposed
        self._fixed: dict[str, Tensor] = {}
        self._rows: dict[str, _Rows] = {}
        self._output, self._bias = layer.output_names
        self._transposed = layer.transposed
        self._columns = _index(marked[self._output].reshape(-1).astype(np.int64), columns.size, device)
        for name in marked:
            if name in (self._output, self._bias):
                continue
            if layer.is_norm(name):
                gains = marked[name].astype(tensors[name].dtype)  # rounded as in the result
                self._fixed[name] = torch.from_numpy(gains.astype(np.float32)).to(device)
                continue
            self._rows[name] = self._found(np.abs(marked[name].reshape(-1)).astype(np.int64), tensors[name], device)

    def _found(self, numbers: Any, own: Any, device: Any) -> "_Rows":
        """Where a tensor's rows come from.

        Args:
            numbers: of each of its rows, 0 for one that stays.
            own: the source's tensor.
            device: of the module.
        """
        index, present, first, base = np.zeros_like(numbers), [], 1, 0
        for role, count in self._counts.items():
            held = (numbers >= first) & (numbers < first + count)
            if held.any():
                present.append(role)
                index = np.where(held, numbers - first + base, index)
                base += count
            first += count
        if not present:
            raise UnsupportedFamilyError(
                f"{self._module} has a projection that holds no heads: calibration can't fit it"
            )
        taken = numbers != 0
        names = tuple(present if own.ndim == 2 else [BIASES[role] for role in present])
        if taken.all():
            return _Rows(names, _index(index, base, device), None, None)
        upright = own.T if self._transposed and own.ndim == 2 else own
        fixed = torch.from_numpy(upright.astype(np.float32)).to(device)
        return _Rows(names, _index(index, base, device), torch.from_numpy(taken).to(device), fixed)

    def __call__(self, parts: Parts) -> dict[str, Tensor]:
        """The module's parameters, by name inside it, with gradients to the parts. With `repeats_products`, some are
        `RepeatedRows`.
        """
        result: dict[str, Any] = dict(self._fixed)
        for name, rows in self._rows.items():
            whole = rows.gathered(parts, repeats_products=self._repeats_products)
            result[name] = whole.T if self._transposed and whole.dim() == 2 else whole
        columns = parts["outputs"].permute(2, 0, 1, 3).flatten(1)
        columns = columns if self._columns is None else columns.index_select(1, self._columns)
        result[self._output] = columns.T if self._transposed else columns
        if "output_bias" in parts:
            result[self._bias] = parts["output_bias"]
        return {name.removeprefix(f"{self._module}."): tensor for name, tensor in result.items()}


def repeated_parameters(layout: LayerLayout, tensors: Tensors, groups: int) -> dict[str, Tensor]:
    """A merged layer as the parameters of the source's module: K/V heads repeated, rounded as in the result.

    Args:
        layout: of the source's layer.
        tensors: the merged layer's, as the result has them.
        groups: its K/V heads.
    """
    return {
        name.removeprefix(f"{layout.layer.module}."): torch.from_numpy(array.astype(np.float32))
        for name, array in layout.repeated(tensors, groups).items()
    }


@dataclass(frozen=True, slots=True)
class _Rows:
    """A projection's weight or bias: rows of parts, and those rows of the source that do not change."""

    names: tuple[str, ...]
    """Of the parts whose rows it has, one after the other; they have inputs in common."""
    index: Tensor | None
    """Which of these; None for all, as they stand."""
    taken: Tensor | None
    """Which rows of the result are taken from there; None for all."""
    fixed: Tensor | None
    """The source's tensor, rows first, unless all are taken."""

    def gathered(self, parts: Parts, *, repeats_products: bool) -> Any:
        found = [parts[name].flatten(0, -2) if name in BIASES else parts[name].flatten() for name in self.names]
        rows = found[0] if len(found) == 1 else torch.cat(found)
        if self.index is not None:
            fewer = rows.dim() == 2 and self.taken is None and len(rows) <= FEWER * len(self.index)
            rows = RepeatedRows(rows, self.index) if fewer and repeats_products else rows.index_select(0, self.index)
        if self.taken is None or self.fixed is None:
            return rows
        return torch.where(self.taken if rows.dim() == 1 else self.taken[:, None], rows, self.fixed)


def _index(numbers: Any, count: int, device: Any) -> Tensor | None:
    """Numbers below a count as a tensor; None if they are all of them in their order."""
    if len(numbers) == count and (numbers == np.arange(count)).all():
        return None
    return torch.from_numpy(numbers).to(device)
