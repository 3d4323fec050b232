"""Heads as torch parameters, put together into a loaded module's weights by differentiable indexing.

Shape legend as in `gqa_convert.absorbing.heads`; N groups.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gqa_convert.absorbing.heads import Heads, LayerTensors, Tensors
from gqa_convert.errors import UnsupportedFamilyError

ROLES = ("queries", "keys", "values", "outputs", "output_bias")
Parts = Mapping[str, Tensor]
"""The fields of `Heads` as tensors; `output_bias` is left out where there is none."""


def as_parts(heads: Heads, device: Any, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The fields of heads as tensors."""
    found = {role: getattr(heads, role) for role in ROLES}
    return {role: torch.from_numpy(array).to(device, dtype) for role, array in found.items() if array is not None}


def as_heads(parts: Parts) -> Heads:
    """The reverse, in float64."""
    arrays = {role: tensor.detach().double().cpu().numpy() for role, tensor in parts.items()}
    return Heads(**{role: arrays.get(role) for role in ROLES})  # type: ignore[arg-type]


class Assembly:
    """From merged heads to the parameters of the source's own module, heads repeated.

    Which row of which tensor is which row of which head is found by sending row numbers through the layout's own code.

    Args:
        layer: the tensors of the layer.
        source: its heads.
        tensors: its tensors, whose gains of key norms are averaged over each group.
        groups: K/V heads of the result.
        device: of the module.

    Raises:
        UnsupportedFamilyError: a tensor's numbers lie otherwise than rows and columns of heads do.
    """

    def __init__(self, layer: LayerTensors, source: Heads, tensors: Tensors, groups: int, device: Any) -> None:
        shapes = {
            "queries": source.queries.shape[:3], "keys": (groups, source.keys.shape[1]), "values": (groups, source.values.shape[1]),
        }  # fmt: skip
        self._first: dict[str, int] = {}
        numbers: dict[str, Any] = {}
        count = 1  # a row's number is negative in the column of its bias
        for role, shape in shapes.items():
            self._first[role] = count
            rows = np.arange(count, count + int(np.prod(shape)), dtype=np.float64).reshape(shape)
            numbers[role] = np.stack([rows, -rows], axis=-1)
            count += int(np.prod(shape))
        ratio, width = source.outputs.shape[1], source.outputs.shape[3]
        columns = np.arange(source.groups * ratio * width, dtype=np.float64).reshape(source.groups, ratio, 1, width)
        bias = None if source.output_bias is None else np.zeros(1)
        marked = layer.join(Heads(**numbers, outputs=columns, output_bias=bias), layer.narrowed(tensors), groups)
        self._module = layer.layer.module
        self._fixed: dict[str, Tensor] = {}
        self._rows: dict[str, tuple[Tensor, Tensor]] = {}
        """Name -> rows among those of all roles together, and whether each is taken (else it is the source's)."""
        self._output, self._bias = layer.output_names
        self._transposed = layer.transposed
        self._columns = torch.from_numpy(marked[self._output].reshape(-1)).long().to(device)
        gains = layer.join(source, tensors, groups)
        for name in marked:
            if name in (self._output, self._bias):
                continue
            if layer.is_norm(name):
                self._fixed[name] = torch.from_numpy(gains[name].astype(np.float32)).to(device)
                continue
            found = marked[name].reshape(-1)
            self._rows[name] = torch.from_numpy(np.abs(found)).long().to(device), torch.from_numpy(found != 0).to(device)
            self._fixed[name] = torch.from_numpy(tensors[name].astype(np.float32)).to(device)

    def __call__(self, parts: Parts) -> dict[str, Tensor]:
        """The module's parameters, by name inside it, with gradients to the parts."""
        result: dict[str, Tensor] = {}
        rows = {role: parts[role].flatten(0, -2) for role in ("queries", "keys", "values")}
        for name, fixed in self._fixed.items():
            if name not in self._rows:
                result[name] = fixed
                continue
            numbers, taken = self._rows[name]
            upright = fixed.T if self._transposed and fixed.dim() == 2 else fixed
            own = self._gathered(rows, numbers, bias=fixed.dim() == 1)
            whole = torch.where(taken if own.dim() == 1 else taken[:, None], own, upright)
            result[name] = whole.T if self._transposed and fixed.dim() == 2 else whole
        columns = parts["outputs"].permute(2, 0, 1, 3).flatten(1)[:, self._columns]
        result[self._output] = columns.T if self._transposed else columns
        if "output_bias" in parts:
            result[self._bias] = parts["output_bias"]
        return {name.removeprefix(f"{self._module}."): tensor for name, tensor in result.items()}

    def _gathered(self, rows: dict[str, Tensor], numbers: Tensor, *, bias: bool) -> Tensor:
        """Rows by their numbers; roles in one tensor have inputs in common."""
        present = [role for role, first in self._first.items() if bool(((numbers >= first) & (numbers < first + len(rows[role]))).any())]
        if not present:
            raise UnsupportedFamilyError(f"{self._module} has a projection that holds no heads: calibration can't fit it")
        base, parts, index = 0, [], torch.zeros_like(numbers)
        for role in present:
            first, own = self._first[role], rows[role][:, -1] if bias else rows[role][:, :-1]
            held = (numbers >= first) & (numbers < first + len(own))
            index = torch.where(held, numbers - first + base, index)
            parts.append(own)
            base += len(own)
        return torch.cat(parts)[index]
