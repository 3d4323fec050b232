"""Determines by measurement which tensor an attention module's output is added to.

Families differ in how the residual stream passes attention: around a norm before it, around a norm after it, around a
module that holds both, or beside a parallel MLP. There is no table of these structures; instead, every tensor that
enters a module of the layer is tested on the tokens of one sequence.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_ELEMENTS = 8192
"""The number of elements of a tensor that are compared."""
_SLACK = 1e-3
"""The relative error of attention's output that counts as rounding, for example in float32 with TF32."""


@dataclass(frozen=True, slots=True)
class Route:
    """Where a tensor r enters a module, such that later modules read r + factor * (the attention's contribution)."""

    module: str
    """The module's name in the loaded model."""
    key: int | str
    """The argument's position or name."""
    factor: float
    output: str | None = None
    """The module inside attention whose output is the contribution, if attention itself adds r to it."""

    def residual(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """The tensor r among the module's arguments, in units of attention's output."""
        tensor: Tensor = args[self.key] if isinstance(self.key, int) else kwargs[self.key]
        return tensor if self.factor == 1 else tensor / self.factor


@dataclass(frozen=True, slots=True)
class _Event:
    """A tensor that has entered or left a module. Of its elements only a sample is kept."""

    module: str
    key: int | str | None
    """Of the argument; None for an output."""
    size: int
    rounding: float
    values: Tensor
    weighted: bool
    """Whether the module has parameters of its own."""


class LayerTrace:
    """What enters and leaves the modules of one layer in one call of the model.

    Args:
        model: the loaded model.
        layer: the layer's name in it.
    """

    def __init__(self, model: Any, layer: str) -> None:
        self._layer = layer
        self._events: list[_Event] = []
        self._hooks: list[Any] = []
        for name, module in model.get_submodule(layer).named_modules(prefix=layer):
            weighted = next(module.parameters(recurse=False), None) is not None
            self._hooks += [
                module.register_forward_pre_hook(self._entering(name, weighted), with_kwargs=True),
                module.register_forward_hook(self._leaving(name, weighted)),
            ]

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _entering(self, name: str, weighted: bool) -> Any:
        def entering(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            arguments: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
            for key, value in arguments:
                if isinstance(value, Tensor):
                    self._note(name, key, value, weighted)

        return entering

    def _leaving(self, name: str, weighted: bool) -> Any:
        def leaving(_: Any, __: Any, output: Any) -> None:
            first = first_tensor(output)
            if first is not None:
                self._note(name, None, first, weighted)

        return leaving

    def _note(self, name: str, key: int | str | None, tensor: Tensor, weighted: bool) -> None:
        if not tensor.is_floating_point() or tensor.dim() < 2:
            return
        flat = tensor.detach().reshape(-1)
        step = max(1, len(flat) // _ELEMENTS) | 1  # odd, so that it does not divide the hidden_size
        sample = flat[::step].double().cpu()
        self._events.append(_Event(name, key, len(flat), torch.finfo(tensor.dtype).eps, sample, weighted))

    def route(self, attention: str) -> Route | None:
        """Where the tensor enters that the output of an attention module is added to.

        Args:
            attention: the module's name in the loaded model.

        Returns:
            None if there is no such tensor, for example because the output is normed before it is added.
        """
        left = [event.module == attention and event.key is None for event in self._events]
        if True not in left:
            return None
        moment = left.index(True)
        output = self._events[moment]
        inside = f"{attention}."
        alike = [event for event in self._events[:moment] if event.size == output.size]
        entered = [event for event in alike if event.key is not None and not event.module.startswith(inside)]
        projected = [event for event in alike if event.key is None and event.module.startswith(inside)]
        beside = [event for event in alike if event.key is None and not event.module.startswith(inside)]
        projected = [event for event in projected if event.weighted]
        if projected:
            inner = projected[-1].module.removeprefix(inside)
            route = _added(output, entered, projected[-1], [], inner)
            if route is not None:
                return route
        for event in self._events[moment + 1 :]:
            if event.size != output.size or event.module.startswith(inside):
                continue
            route = _added(event, entered, output, beside)
            if route is not None:
                return route
            if event.key is None:
                if event.module == self._layer:
                    break
                beside.append(event)
        return None


def _added(
    total: _Event, entered: list[_Event], contribution: _Event, beside: list[_Event], output: str | None = None
) -> Route | None:
    """The tensor of which `total` is the sum with a contribution, and possibly with the output of another module."""
    for others in ([], *([other] for other in beside)):
        for known in entered:
            factor = _factor(total, known, [contribution, *others])
            if factor is not None:
                assert known.key is not None
                return Route(known.module, known.key, factor, output)
    return None


def _factor(total: _Event, known: _Event, summands: list[_Event]) -> float | None:
    """The number a for which total = known + a * summands[0] (+ b * summands[1]) up to rounding; None if there is none.

    This is weighted least squares: the few huge numbers of a residual stream, whose rounding errors may exceed
    attention's whole output, must not dominate.
    """
    columns = torch.stack([summand.values for summand in summands], dim=1)
    size = total.values.abs() + known.values.abs() + columns.abs().sum(1)
    slack = 4 * total.rounding * size + 1e-30
    usable = torch.isfinite(slack)
    matrix = columns[usable] / slack[usable, None]
    target = ((total.values - known.values) / slack)[usable]
    if len(matrix) < 8 or not bool(matrix[:, 0].any()):
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


def first_tensor(output: Any) -> Any:
    """The first tensor of a module's output; None if it has none."""
    if isinstance(output, Tensor):
        return output
    for each in output or ():
        if isinstance(each, Tensor):
            return each
    return None
