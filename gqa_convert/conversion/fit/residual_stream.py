"""Determines by measurement where the output of attention has become part of the residual stream.

Families differ in how the stream passes attention: around a norm before it, around a norm after it, around a module that
holds both, or beside a parallel MLP. There is no table of these structures; instead, a layer runs twice on the tokens of
one sequence, with attention's contribution and with zeros in its place. Where tensors differ by a multiple of the
contribution, and hold more than that, is the stream.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_ELEMENTS = 8192
"""The number of elements of a tensor that are compared."""
_SLACK = 1e-3
"""The relative error of a contribution that counts as rounding, for example in float32 with TF32."""


@dataclass(frozen=True, slots=True)
class StreamPlace:
    """A tensor that enters or leaves a module: (what does not depend on attention) + factor * (its contribution)."""

    module: str
    """The module's name in the loaded model."""
    key: int | str | None
    """The argument's position or name; None for the output."""
    factor: float = 1.0

    def watch(self, model: Any, arrive: Callable[[Tensor], None]) -> Callable[[], None]:
        """Call a function with the tensor each time; returns what ends this."""
        module = model.get_submodule(self.module)

        def leaving(_: Any, __: Any, output: Any) -> None:
            arrive(first_tensor(output))

        def entering(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            arrive(args[self.key] if isinstance(self.key, int) else kwargs[str(self.key)])

        if self.key is None:
            hook = module.register_forward_hook(leaving)
        else:
            hook = module.register_forward_pre_hook(entering, with_kwargs=True)
        remove: Callable[[], None] = hook.remove
        return remove


def find_stream(model: Any, layer: str, projection: str, run: Callable[[], Any]) -> StreamPlace | None:
    """The first place in a layer at which the contribution of an attention module is part of the residual stream.

    Args:
        model: the loaded model.
        layer: the layer's name in it.
        projection: the name of attention's output projection in it, whose output is the contribution.
        run: runs the layer, the same each time.

    Returns:
        None if there is no such place in the layer, for example because the contribution is normed before it is added.
    """
    module = model.get_submodule(projection)
    whole = _trace(model, layer, run)
    silencer = module.register_forward_hook(lambda _, __, output: torch.zeros_like(output))
    without = _trace(model, layer, run)
    silencer.remove()
    start = whole.index(next(each for each in whole if each.place == StreamPlace(projection, None)))
    contribution = whole[start].values
    for one, other in zip(whole[start + 1 :], without[start + 1 :], strict=False):
        if one.place != other.place:
            return None  # experts are chosen otherwise
        if one.size == whole[start].size:
            factor = _factor(one.values, other.values, contribution, one.rounding)
            if factor is not None:
                return StreamPlace(one.place.module, one.place.key, factor)
    return None


@dataclass(frozen=True, slots=True)
class _Passing:
    """A tensor that entered or left a module. Of its elements only a sample is kept."""

    place: StreamPlace
    size: int
    rounding: float
    values: Tensor


def _trace(model: Any, layer: str, run: Callable[[], Any]) -> list[_Passing]:
    """What enters and leaves the modules of a layer in one run, in this order."""
    found: list[_Passing] = []

    def note(name: str, key: int | str | None, value: Any) -> None:
        if isinstance(value, Tensor) and value.is_floating_point():
            flat = value.detach().reshape(-1)
            step = max(1, len(flat) // _ELEMENTS) | 1  # odd, so that it does not divide the hidden_size
            sample = flat[::step].double().cpu()
            found.append(_Passing(StreamPlace(name, key), len(flat), torch.finfo(value.dtype).eps, sample))

    def entering(name: str) -> Any:
        def enter(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for position, value in enumerate(args):
                note(name, position, value)
            for key, value in kwargs.items():
                note(name, key, value)

        return enter

    def leaving(name: str) -> Any:
        return lambda _, __, output: note(name, None, first_tensor(output))

    hooks = []
    for name, module in model.get_submodule(layer).named_modules(prefix=layer):
        hooks.append(module.register_forward_pre_hook(entering(name), with_kwargs=True))
        hooks.append(module.register_forward_hook(leaving(name)))
    run()
    for hook in hooks:
        hook.remove()
    return found


def _factor(whole: Tensor, without: Tensor, contribution: Tensor, rounding: float) -> float | None:
    """The number a for which whole = without + a * contribution up to rounding; None if there is none, or if `without`
    is zero.

    This is weighted least squares: the few huge numbers of a residual stream, whose rounding errors may exceed the
    contribution, must not dominate.
    """
    slack = 4 * rounding * (whole.abs() + without.abs() + contribution.abs()) + 1e-30
    usable = torch.isfinite(slack)
    column = (contribution / slack)[usable]
    target = ((whole - without) / slack)[usable]
    if len(column) < 8 or not bool(column.any()) or not bool(without[usable].any()):
        return None
    factor = float(column @ target / column.square().sum())
    fits = (target - factor * column).abs() <= 1 + _SLACK * (factor * column).abs()
    told = (factor * column).abs() > 16  # numbers large enough to distinguish a fit from chance
    if fits.double().mean() < 0.999 or told.double().mean() < 0.05:
        return None
    return 1.0 if abs(factor - 1) < 2 * _SLACK else factor


def first_tensor(output: Any) -> Any:
    """The first tensor of a module's output; None if it has none."""
    if isinstance(output, Tensor):
        return output
    for each in output or ():
        if isinstance(each, Tensor):
            return each
    return None
