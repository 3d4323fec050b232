"""Determines by measurement where the output of attention has become part of the residual stream.

Families differ in how the stream passes attention: around a norm before it, around a norm after it, around a module that
holds both, or beside a parallel MLP. There is no table of these structures; instead, a layer runs twice on one sequence,
with attention's contribution and with zeros in its place. The first tensor that differs by a multiple of the contribution,
and holds more than that, is the stream.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

_TOLERANCE = 0.02
"""Of a difference, relative to it."""


@dataclass(frozen=True, slots=True)
class StreamPlace:
    """A tensor that enters or leaves a module: (what does not depend on attention) + factor * (its contribution)."""

    module: str
    """The module's name in the loaded model."""
    enters: bool
    factor: float = 1.0


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
    start = next(number for number, (*place, _) in enumerate(whole) if place == [projection, False])
    contribution = whole[start][2]
    for (module, enters, one), (*place, other) in zip(whole[start + 1 :], without[start + 1 :], strict=False):
        if place != [module, enters]:
            break  # experts are chosen otherwise
        if len(one) != len(contribution) or not other.any():
            continue
        difference = one - other
        factor = float(difference @ contribution / (contribution @ contribution))
        if factor and (difference - factor * contribution).norm() < _TOLERANCE * difference.norm():
            return StreamPlace(module, enters, 1.0 if abs(factor - 1) < _TOLERANCE / 10 else factor)
    return StreamPlace(projection, enters=False)


def _trace(model: Any, layer: str, run: Callable[[], Any]) -> list[tuple[str, bool, Tensor]]:
    """What enters (True) and leaves (False) the modules of a layer in one run, in this order."""
    found: list[tuple[str, bool, Tensor]] = []

    def note(name: str, enters: bool, value: Any) -> None:
        if isinstance(value, Tensor) and value.is_floating_point():
            found.append((name, enters, value.detach().flatten().double()))

    hooks = []
    for name, module in model.get_submodule(layer).named_modules(prefix=layer):
        hooks += [on_passing(module, enters, partial(note, name, enters)) for enters in (True, False)]
    run()
    for hook in hooks:
        hook.remove()
    return found


def on_passing(module: Any, enters: bool, arrive: Callable[[Any], None]) -> Any:
    """A hook that calls a function with the first tensor that enters, or that leaves, a module each time."""
    if enters:
        return module.register_forward_pre_hook(
            lambda _, args, kwargs: arrive(first_tensor((*args, *kwargs.values()))), with_kwargs=True
        )
    return module.register_forward_hook(lambda _, __, output: arrive(first_tensor(output)))


def first_tensor(values: Any) -> Any:
    """The first tensor of a module's output or arguments; None if there is none."""
    if isinstance(values, Tensor):
        return values
    return next((value for value in values or () if isinstance(value, Tensor)), None)
