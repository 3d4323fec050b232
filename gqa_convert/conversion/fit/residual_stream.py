"""Determines by measurement where the output of attention has become part of the residual stream.

Families differ in how the stream passes attention: around a norm before it, around a norm after it, around a module that
holds both, or beside a parallel MLP. There is no table of these structures; instead, a layer runs twice on one sequence,
with attention's contribution and with zeros in its place. Where a tensor differs by a multiple of the contribution, and
holds more than that, is the stream.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

_ELEMENTS = 8192
"""The number of elements of a tensor that are compared."""
_VISIBLE = 3e-5
"""The share of a float32 number from which on a contribution to it stands out of its rounding."""
_TOLERANCE = 0.02
"""Of the ratio between a difference and a contribution."""


@dataclass(frozen=True, slots=True)
class StreamPlace:
    """A tensor that enters or leaves a module: (what does not depend on attention) + factor * (its contribution)."""

    module: str
    """The module's name in the loaded model."""
    enters: bool
    factor: float = 1.0


Passing = tuple[str, bool, Tensor]
"""A module, whether a tensor enters or leaves it, and a sample of the tensor's elements."""


def find_stream(model: Any, layer: str, projection: str, run: Callable[[], Any]) -> StreamPlace:
    """The first place in a layer at which the contribution of an attention module is part of the residual stream.

    Args:
        model: the loaded model, in float32.
        layer: the layer's name in it.
        projection: the name of attention's output projection in it, whose output is the contribution.
        run: runs the layer, the same each time.

    Returns:
        The output of the projection itself if there is no such place in the layer, for example because the contribution
        is normed before it is added.
    """
    whole = _trace(model, layer, run)
    silencer = model.get_submodule(projection).register_forward_hook(lambda _, __, output: torch.zeros_like(output))
    without = _trace(model, layer, run)
    silencer.remove()
    start = next(number for number, passing in enumerate(whole) if passing[:2] == (projection, False))
    contribution = whole[start][2]
    for (module, enters, one), (*place, other) in zip(whole[start + 1 :], without[start + 1 :], strict=False):
        if place != [module, enters]:
            break  # experts are chosen otherwise
        if one.shape == contribution.shape:
            factor = _factor(one, other, contribution)
            if factor is not None:
                return StreamPlace(module, enters, factor)
    return StreamPlace(projection, enters=False)


def _trace(model: Any, layer: str, run: Callable[[], Any]) -> list[Passing]:
    """What enters and leaves the modules of a layer in one run, in this order."""
    found: list[Passing] = []

    def note(name: str, enters: bool, value: Any) -> None:
        if isinstance(value, Tensor) and value.is_floating_point():
            flat = value.detach().flatten()
            step = max(1, len(flat) // _ELEMENTS) | 1  # odd, so that it does not divide the hidden_size
            found.append((name, enters, flat[::step].double()))

    hooks = []
    for name, module in model.get_submodule(layer).named_modules(prefix=layer):
        hooks.append(on_entering(module, partial(note, name, True)))
        hooks.append(on_leaving(module, partial(note, name, False)))
    run()
    for hook in hooks:
        hook.remove()
    return found


def _factor(whole: Tensor, without: Tensor, contribution: Tensor) -> float | None:
    """The number a for which whole = without + a * contribution up to rounding; None if there is none, or if `without`
    is zero.

    Elements in which the contribution drowns in the rounding of huge numbers do not count.
    """
    told = contribution.abs() > _VISIBLE * (whole.abs() + without.abs())
    if told.double().mean() < 0.05 or not without[told].any():
        return None
    ratios = (whole - without)[told] / contribution[told]
    factor = float(ratios.median())
    close = (ratios - factor).abs() <= _TOLERANCE * abs(factor)
    if not factor or close.double().mean() < 0.999:
        return None
    return 1.0 if abs(factor - 1) < _TOLERANCE / 10 else factor


def on_entering(module: Any, arrive: Callable[[Any], None]) -> Any:
    """A hook that calls a function with the first tensor that enters a module each time."""

    def enter(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arrive(first_tensor((*args, *kwargs.values())))

    return module.register_forward_pre_hook(enter, with_kwargs=True)


def on_leaving(module: Any, arrive: Callable[[Any], None]) -> Any:
    """A hook that calls a function with the first tensor that leaves a module each time."""

    def leave(_: Any, __: Any, output: Any) -> None:
        arrive(first_tensor(output))

    return module.register_forward_hook(leave)


def first_tensor(output: Any) -> Any:
    """The first tensor of a module's output; None if it has none."""
    if isinstance(output, Tensor):
        return output
    for each in output or ():
        if isinstance(each, Tensor):
            return each
    return None
