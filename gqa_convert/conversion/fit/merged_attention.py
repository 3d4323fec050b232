"""A merged layer inside the source's own attention module, whose code runs it and passes gradients to it."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gqa_convert.conversion.fit.source_layers import SourceLayer
from gqa_convert.errors import UnsupportedFamilyError
from gqa_convert.families import layouts
from gqa_convert.merging.attention_heads import LayerLayout, Tensors
from gqa_convert.merging.factorisation import Array


class MergedAttention:
    """A merged layer, and the loaded module of the source in which it is installed.

    The module has more K/V heads than the layer, so that the rows of a weight are gathered. Where a projection makes
    nothing but keys or values, its output is repeated instead, and its product costs what few heads cost.

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
        self._device = next(module.parameters()).device
        self.tensors: dict[str, Tensor] = {}
        self._parts: dict[str, list[str]] = {}
        """Which of `self.tensors` make a tensor of the result, by its name."""
        self._gains: dict[str, Tensor] = {}
        """Of key norms, by name inside the module."""
        self._rows: dict[str, Tensor] = {}
        """The numbers of the rows that are gathered."""
        self._gates: dict[str, Tensor] = {}
        """Which rows belong to gates, [rows]: they stay as they are."""
        self._repeated: list[Any] = []
        """Projections whose output is repeated."""
        for name, sections in layout.projections.items():
            self._add_projection(name, self._on_device(tensors[name]), sections)
        for name in layout.output_names:
            if name in tensors:
                self.tensors[name] = self._on_device(tensors[name])
                self._parts[name] = [name]
        if len(layout.names) > len(self._parts):  # norms that count heads
            for name, array in layout.repeated(tensors, groups).items():
                if name not in self._parts:
                    self._gains[name.removeprefix(self._prefix)] = self._on_device(array)

    def _on_device(self, array: Array) -> Tensor:
        return torch.from_numpy(array.astype(np.float32)).to(self._device)

    def _axis(self, tensor: Tensor) -> int:
        """The axis of a projection's rows: Conv1D's weights are transposed, biases never."""
        return 1 if self._transposed and tensor.ndim == 2 else 0

    def _add_projection(self, name: str, tensor: Tensor, sections: tuple[layouts.Section, ...]) -> None:
        own = layouts.regrouped(sections, self._groups)
        axis = self._axis(tensor)
        numbers = layouts.split(np.arange(tensor.shape[axis]), own)
        roles = [section.role for section in own]
        if "gate" in roles or len(roles) == 1:
            self._parts[name] = [name]
            self.tensors[name] = tensor
        else:
            self._parts[name] = [f"{role}.{name}" for role in roles]
            self.tensors |= zip(self._parts[name], tensor.split([section.rows for section in own], axis), strict=True)
        if "gate" in roles:
            gates = np.isin(np.arange(len(tensor)), numbers[roles.index("gate")])
            self._gates[name] = torch.from_numpy(gates).to(self._device)
        projection = self._module.get_submodule(name.removeprefix(self._prefix).rpartition(".")[0])
        if roles in (["key"], ["value"]) and type(projection) is torch.nn.Linear:
            if projection not in self._repeated:
                self._repeated.append(projection)
        elif any(section.merged for section in own):
            for number, section in enumerate(own):
                if section.merged:
                    numbers[number] = numbers[number].repeat(self._times, axis=0)
            self._rows[name] = torch.from_numpy(layouts.join(numbers, sections)).to(self._device)

    @contextmanager
    def installed(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """A context in which the module computes what the layer does.

        Args:
            tensors: in place of `self.tensors`; gradients reach them.
        """
        parameters = dict(self._gains)
        for name, tensor in self.joined(tensors).items():
            if name in self._gates:
                gates = self._gates[name].view(-1, *[1] * (tensor.ndim - 1))
                tensor = torch.where(gates, tensor.detach(), tensor)
            if name in self._rows:
                tensor = tensor.index_select(self._axis(tensor), self._rows[name])
            parameters[name.removeprefix(self._prefix)] = tensor
        with replaced(self._module, parameters), ExitStack() as stack:
            for projection in self._repeated:
                stack.callback(projection.register_forward_hook(self._repeat).remove)
            yield

    def joined(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of the result, of such as are in `self.tensors`."""
        found = {}
        for name, parts in self._parts.items():
            first = tensors[parts[0]]
            found[name] = torch.cat([tensors[part] for part in parts], self._axis(first)) if parts[1:] else first
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
