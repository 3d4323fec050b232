"""A merged layer inside the source's own attention module, whose code runs it and passes gradients to it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gqa_convert.conversion.fit.source_layers import SourceLayer
from gqa_convert.errors import UnsupportedFamilyError
from gqa_convert.families import layouts
from gqa_convert.merging.attention_heads import LayerLayout, Tensors, rows_first


class MergedAttention:
    """A merged layer, and the loaded module of the source in which it is installed.

    The module has more K/V heads than the layer. So rows of a weight are gathered by their numbers, which the layout tells
    by repeating tensors that hold the numbers of their rows. Where a projection makes nothing but keys or values, its
    output is repeated instead, and its product costs what few heads cost.

    Args:
        layout: of the source's layer.
        tensors: of the merged layer, as the result has them.
        groups: its K/V heads.
        module: the loaded module.

    Attributes:
        tensors: the projections' weights and biases, in float32 on the module's device. Queries, keys and values of a fused
            projection are apart, so that each is trained by its own size.
    """

    def __init__(self, layout: LayerLayout, tensors: Tensors, groups: int, module: Any) -> None:
        self._module, self._prefix, self._transposed = module, f"{layout.layer.module}.", layout.transposed
        self._groups, self._times = groups, layout.layer.kv_heads // groups
        output, _ = layout.output_names
        device = next(module.parameters()).device
        numbered = dict(tensors)
        columns = rows_first(tensors[output], not layout.transposed)
        numbered[output] = rows_first(columns[:, :1], not layout.transposed)
        for name in layout.projections:
            rows = rows_first(tensors[name], layout.transposed)
            numbers = np.arange(len(rows)).reshape(-1, *[1] * (rows.ndim - 1))
            numbered[name] = rows_first(numbers, layout.transposed)
        self.tensors: dict[str, Tensor] = {}
        self._parts: dict[str, list[str]] = {}
        """Which of `self.tensors` make a tensor of the result, by its name."""
        self._gains: dict[str, Tensor] = {}
        """Of key norms, by name inside the module."""
        self._rows: dict[str, Tensor] = {}
        """The numbers of the rows that are gathered."""
        self._gates: dict[str, Tensor] = {}
        """Which rows belong to gates, [rows, 1] or [rows]: they stay as they are."""
        self._repeated: set[Any] = set()
        """Projections whose output is repeated."""
        for name, array in layout.repeated(numbered, groups).items():
            key = name.removeprefix(self._prefix)
            if name not in layout.projections and name not in layout.output_names:
                self._gains[key] = torch.from_numpy(array.astype(np.float32)).to(device)
                continue
            tensor = torch.from_numpy(tensors[name].astype(np.float32)).to(device)
            sections = layouts.regrouped(layout.projections.get(name, ()), groups)
            roles = [section.role for section in sections]
            self._parts[name] = [name]
            if "gate" in roles:
                gates = layouts.split(numbered[name], sections)[roles.index("gate")]
                self._gates[name] = torch.from_numpy(np.isin(numbered[name], gates)).to(device)
            elif len(roles) > 1:
                self._parts[name] = [f"{role}.{name}" for role in roles]
            sizes = [section.rows for section in sections] if len(self._parts[name]) > 1 else [len(tensor)]
            parts: Any = rows_first(tensor, layout.transposed and len(sizes) > 1)
            self.tensors |= zip(self._parts[name], parts.split(sizes), strict=True)
            projection = module.get_submodule(key.rpartition(".")[0])
            if roles in (["key"], ["value"]) and type(projection) is torch.nn.Linear:
                self._repeated.add(projection)
            elif {"key", "value"} & {*roles}:
                self._rows[name] = torch.from_numpy(rows_first(array, layout.transposed).reshape(-1)).to(device)

    @contextmanager
    def installed(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """A context in which the module computes what the layer does.

        Args:
            tensors: in place of `self.tensors`; gradients reach them.
        """
        parameters: dict[str, Any] = dict(self._gains)
        for name, tensor in self.joined(tensors).items():
            if name in self._gates:
                tensor = torch.where(self._gates[name], tensor.detach(), tensor)
            if name in self._rows:
                rows: Any = rows_first(tensor, self._transposed)
                tensor = rows_first(rows.index_select(0, self._rows[name]), self._transposed)
            parameters[name.removeprefix(self._prefix)] = tensor
        hooks = [projection.register_forward_hook(self._repeat) for projection in self._repeated]
        try:
            with replaced(self._module, parameters):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def joined(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of the result, of such as are in `self.tensors`."""
        found = {}
        for name, parts in self._parts.items():
            found[name] = tensors[parts[0]]
            if len(parts) > 1:
                whole: Any = torch.cat([tensors[part] for part in parts])
                found[name] = rows_first(whole, self._transposed)
        return found

    def _repeat(self, _: Any, __: Any, output: Tensor) -> Tensor:
        heads = output.unflatten(-1, (self._groups, 1, -1))
        return heads.expand(*heads.shape[:-2], self._times, -1).flatten(-3)


def check_holds(module: Any, layer: SourceLayer) -> None:
    """Refuse a loaded module whose parameters are not the checkpoint's tensors.

    Raises:
        UnsupportedFamilyError: one is missing, or has another shape.
    """
    name = layer.layout.layer.module
    own = dict(module.named_parameters())
    for full_name, array in layer.tensors.items():
        key = full_name.removeprefix(f"{name}.")
        if key not in own or own[key].shape != array.shape:
            raise UnsupportedFamilyError(
                f"transformers holds {name} otherwise than the checkpoint does ({key}), so that calibration can't fit it: "
                "choose --method factor without calibration text"
            )


@contextmanager
def replaced(module: Any, parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """A context in which parameters of a module are replaced, whatever their shapes; gradients reach the replacements.

    Args:
        module: a torch module.
        parameters: the replacements by name inside the module; all others are kept.
    """
    homes = []
    try:
        for name, tensor in parameters.items():
            path, _, last = name.rpartition(".")
            home = module.get_submodule(path)._parameters
            homes.append((home, last, home[last]))
            home[last] = tensor
        yield
    finally:
        for home, last, own in homes:
            home[last] = own
