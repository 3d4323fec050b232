"""A merged layer inside the source's own attention module, whose code runs it and passes gradients
to it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gqa_convert.errors import UnsupportedFamilyError
from gqa_convert.families import layouts
from gqa_convert.merging.attention_heads import LayerLayout, Tensors

from .source_layers import SourceLayer


class _Projection(NamedTuple):
    """A weight or a bias of the result.

    Attributes:
        parts: its names in `MergedAttention.tensors`; several where queries, keys and values are
            trained apart.
        axis: of its rows: Conv1D's weights are transposed, biases never.
        rows: the numbers of the rows that are gathered; None where the module holds what the result
            does.
        gates: which rows belong to gates, as a mask that broadcasts: they stay as they are. None
            without gates.
    """

    parts: Sequence[str]
    axis: int = 0
    rows: Tensor | None = None
    gates: Tensor | None = None


class MergedAttention:
    """A merged layer, and the loaded module of the source in which it is installed.

    The module has more K/V heads than the layer, so that the rows of a weight are gathered. Where a
    projection makes nothing but keys or values, its output is repeated instead, and its product
    costs what few heads cost.

    Args:
        layout: of the source's layer.
        tensors: of the merged layer, as the result has them.
        kv_heads: its K/V heads.
        module: the loaded module.

    Attributes:
        tensors: the projections' weights and biases, in float32 on the module's device. Queries,
            keys and values of a fused projection are apart, so that each is trained by its own
            size.
    """

    def __init__(self, layout: LayerLayout, tensors: Tensors, kv_heads: int, module: Any) -> None:
        self.layout, self._module = layout, module
        self._kv_heads, self._times = kv_heads, layout.layer.kv_heads // kv_heads
        self._device = next(module.parameters()).device
        self._prefix = f"{layout.layer.module}."
        self.tensors: dict[str, Tensor] = {}
        self._projections: dict[str, _Projection] = {}
        self._repeated: set[Any] = set()
        """Projections whose output is repeated."""
        for name, sections in layout.projections.items():
            self._add(name, self._on_device(tensors[name]), sections)
        for name in layout.output_names:
            if name in tensors:
                self.tensors[name] = self._on_device(tensors[name])
                self._projections[name] = _Projection([name])
        gains = layout.merge_gains(tensors, layout.layer.kv_heads)
        self._gains = {name: self._on_device(gain) for name, gain in gains.items()}

    def _on_device(self, array: Any) -> Tensor:
        tensor = array if isinstance(array, Tensor) else torch.from_numpy(array.astype(np.float32))
        return tensor.to(self._device, torch.float32)

    def _add(self, name: str, tensor: Tensor, sections: layouts.Sections) -> None:
        """Add a weight or a bias that holds heads.

        Args:
            name: in the checkpoint.
            tensor: of the result.
            sections: of the source's rows.
        """
        own = layouts.regrouped(sections, self._kv_heads)
        axis = 1 if self.layout.transposed and tensor.ndim == 2 else 0
        numbers = layouts.split(np.arange(tensor.shape[axis]), own)
        roles = [section.role for section in own]
        parts, pieces, gates, rows = [name], [tensor], None, None
        # what is trained
        if "gate" in roles:
            gates = torch.zeros(len(tensor), *[1] * (tensor.ndim - 1), dtype=torch.bool)
            gates[numbers[roles.index("gate")].flatten()] = True
            gates = gates.to(self._device)
        elif len(roles) > 1:
            parts = [f"{role}.{name}" for role in roles]
            pieces = tensor.split([section.rows for section in own], axis)
        self.tensors |= zip(parts, pieces, strict=True)
        # how the module's heads come of it
        projection = self._module.get_submodule(self._inside(name).rpartition(".")[0])
        merged = [section.merged for section in own]
        if roles in (["key"], ["value"]) and type(projection) is torch.nn.Linear:
            self._repeated.add(projection)
        elif any(merged):
            for number in np.flatnonzero(merged):
                numbers[number] = numbers[number].repeat(self._times, axis=0)
            rows = torch.from_numpy(layouts.join(numbers, sections)).to(self._device)
        self._projections[name] = _Projection(parts, axis, rows, gates)

    def _inside(self, name: str) -> str:
        return name.removeprefix(self._prefix)

    @contextmanager
    def installed(self, tensors: Mapping[str, Tensor] | None = None) -> Iterator[None]:
        """A context in which the module computes what the layer does.

        Args:
            tensors: in place of `self.tensors`; gradients reach them.
        """
        parameters = {self._inside(name): gain for name, gain in self._gains.items()}
        for name, tensor in self.joined(tensors or self.tensors).items():
            projection = self._projections[name]
            if projection.gates is not None:
                tensor = torch.where(projection.gates, tensor.detach(), tensor)
            if projection.rows is not None:
                tensor = tensor.index_select(projection.axis, projection.rows)
            parameters[self._inside(name)] = tensor
        with replaced(self._module, parameters), ExitStack() as stack:
            for repeated in self._repeated:
                stack.enter_context(repeated.register_forward_hook(self._repeat))
            yield

    def joined(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of the result, of such as are in `self.tensors`."""
        found = {}
        for name, projection in self._projections.items():
            parts = [tensors[part] for part in projection.parts]
            found[name] = torch.cat(parts, projection.axis) if parts[1:] else parts[0]
        return found

    def arrays(self, tensors: Mapping[str, Tensor]) -> Tensors:
        """The same as arrays."""
        return {name: tensor.cpu().numpy() for name, tensor in self.joined(tensors).items()}

    def _repeat(self, _: Any, __: Any, output: Tensor) -> Tensor:
        heads = output.unflatten(-1, (self._kv_heads, 1, -1))
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
                f"transformers holds {name} otherwise than the checkpoint does ({key}), so that "
                "calibration can't fit it: choose --method factor without calibration text"
            )


@contextmanager
def replaced(module: Any, parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """A context in which parameters of a module are replaced, whatever their shapes; gradients
    reach the replacements.

    Args:
        module: a torch module.
        parameters: the replacements by name inside the module; all others are kept.
    """
    with ExitStack() as stack:
        for name, tensor in parameters.items():
            path, _, last = name.rpartition(".")
            home = module.get_submodule(path)._parameters
            stack.callback(home.__setitem__, last, home[last])
            home[last] = tensor
        yield
