"""Determines by measurement which tensor an attention module's output is added to.

Families differ in how the residual stream bypasses attention: around a norm before it, around a norm after it, around a
module that holds both, or beside a parallel MLP. There is no table of these structures; instead, every tensor that
enters a module of the layer is tested on a few tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_ELEMENTS = 8192
"""The number of elements of a tensor that are compared."""
_SLACK = 1e-3
"""The relative error of attention's output that counts as rounding, for example in float32 with TF32."""


@dataclass(frozen=True, slots=True)
class Route:
    """The place at which a tensor r enters a module, where later layers read r + factor * (the attention's
    contribution).
    """

    module: str
    """The module's name in the loaded model."""
    key: int | str
    """The argument's position or name."""
    factor: float
    output: str | None = None
    """The module inside attention whose output is the contribution, if attention itself adds r to it."""

    def taken(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """The tensor among a module's arguments, in units of attention's output."""
        tensor = args[self.key] if isinstance(self.key, int) else kwargs[self.key]
        assert isinstance(tensor, Tensor)
        return tensor if self.factor == 1 else tensor / self.factor


@dataclass(slots=True)
class _Known:
    """A tensor that has entered a module."""

    module: str
    key: int | str
    values: Tensor


@dataclass(slots=True)
class Observer:
    """Watches one attention module's layer during one call of the model.

    Args:
        name: the module's name in the loaded model.
    """

    name: str
    route: Route | None = None
    _known: list[_Known] = field(default_factory=list)
    """Tensors that entered a module before the call of attention."""
    _made: list[Tensor] = field(default_factory=list)
    """Outputs of the layer's other modules."""
    _output: Tensor | None = None
    _projected: tuple[str, Tensor] | None = None
    """The last output inside attention of a module with weights."""
    _over: bool = False

    @property
    def layer(self) -> str:
        """The enclosing module that is an element of a module list; otherwise the parent of the attention module."""
        parts = self.name.split(".")
        numbers = [place for place, part in enumerate(parts) if part.isdecimal()]
        return ".".join(parts[: numbers[-1] + 1] if numbers else parts[:-1])

    def watch(self, model: Any, add: Callable[[Any], object]) -> None:
        """Register hooks.

        Args:
            model: the loaded model.
            add: called with the handle of each hook.
        """
        for name, module in model.get_submodule(self.layer).named_modules(prefix=self.layer):
            inner = name.removeprefix(f"{self.name}.") if name.startswith(f"{self.name}.") else None
            if inner is None:
                add(module.register_forward_pre_hook(self._entering(name), with_kwargs=True))
                add(module.register_forward_hook(self._leaving(name)))
            elif next(module.parameters(recurse=False), None) is not None:
                add(module.register_forward_hook(self._projecting(inner)))

    def _entering(self, name: str) -> Any:
        def entering(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._over:
                return
            arguments: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
            tensors = {key: each for key, each in arguments if isinstance(each, Tensor) and each.is_floating_point()}
            if self._output is not None:
                for each in tensors.values():
                    self._try(each)
                return  # no tensor is recorded after this point
            self._known += [_Known(name, key, each.detach().clone()) for key, each in tensors.items() if each.dim() > 1]

        return entering

    def _leaving(self, name: str) -> Any:
        def leaving(_: Any, __: Any, output: Any) -> None:
            first = (
                output
                if isinstance(output, Tensor)
                else next((each for each in output if isinstance(each, Tensor)), None)
            )
            if self._over or first is None:
                return
            if name == self.name:
                self._output = first.detach().clone()
                self._known = [each for each in self._known if each.values.numel() == first.numel()]
                self._made = [each for each in self._made if each.numel() == first.numel()]
                if self._projected is not None and self._projected[1].numel() == first.numel():
                    inner, projected = self._projected
                    self._try(first, contribution=projected.reshape(first.shape), output=inner)
                return
            self._try(first)
            if name == self.layer:
                self._finish()
            elif first.is_floating_point():
                self._made.append(first.detach().clone())

        return leaving

    def _projecting(self, inner: str) -> Any:
        def projecting(_: Any, __: Any, output: Any) -> None:
            if not self._over and isinstance(output, Tensor):
                self._projected = (inner, output.detach().clone())

        return projecting

    def _finish(self) -> None:
        self._over = True
        self._known, self._made, self._output, self._projected = [], [], None, None

    def _try(self, tensor: Tensor, *, contribution: Tensor | None = None, output: str | None = None) -> None:
        """Test whether a tensor is a recorded tensor plus attention's output, possibly plus the output of another
        module.
        """
        contribution = self._output if contribution is None else contribution
        if self._over or contribution is None or tensor.numel() != contribution.numel():
            return
        others = [made for made in self._made if made.numel() == tensor.numel()] if output is None else []
        for beside in ([], *([made] for made in others)):
            for known in self._known:
                factor = _factor(tensor, known.values, [contribution, *beside])
                if factor is not None:
                    self.route = Route(known.module, known.key, factor, output)
                    self._finish()
                    return


def _factor(total: Tensor, known: Tensor, columns: list[Tensor]) -> float | None:
    """The number a for which total = known + a * columns[0] (+ b * columns[1]) up to rounding; None if there is none.

    This is weighted least squares: the few huge numbers of a residual stream, whose rounding errors may exceed
    attention's whole output, must not dominate.
    """
    rounding = 4 * torch.finfo(total.dtype).eps
    whole, part, *rest = (_sample(each) for each in (total, known, *columns))
    slack = rounding * (whole.abs() + part.abs() + sum(column.abs() for column in rest)) + 1e-30
    usable = torch.isfinite(whole) & torch.isfinite(part) & torch.isfinite(sum(rest, slack))
    matrix = torch.stack(rest, dim=1)[usable] / slack[usable, None]
    target = ((whole - part) / slack)[usable]
    if matrix.shape[0] < 8 or not bool(matrix[:, 0].any()):
        return None
    factors = torch.linalg.lstsq(matrix, target[:, None], driver="gelsd").solution[:, 0]
    if bool((factors[1:] <= 0).any()):  # the output must be added; a negative factor would subtract the known tensor
        return None
    contribution = (factors[0] * matrix[:, 0]).abs()
    error = (target - matrix @ factors).abs()
    fits = error <= 1 + _SLACK * contribution
    told = contribution > 16  # numbers large enough to distinguish a fit from chance
    if fits.double().mean() < 0.999 or told.double().mean() < 0.05:
        return None
    factor = float(factors[0])
    return 1.0 if abs(factor - 1) < 2 * _SLACK else factor


def _sample(tensor: Tensor) -> Tensor:
    """Elements at equal distances, the same for all tensors of one size."""
    flat = tensor.detach().reshape(-1)
    step = max(1, flat.numel() // _ELEMENTS) | 1  # odd, so that it does not divide the hidden_size
    return flat[::step].double().cpu()
