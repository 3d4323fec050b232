"""Determines by measurement where the output of attention has become part of the residual stream.

Families differ in how the stream passes attention: around a norm before it, around a norm after it,
around a module that holds both, or beside a parallel MLP. There is no table of these structures;
instead, a layer runs twice on one sequence, with attention's contribution and with zeros in its
place. The first tensor that differs by a multiple of the contribution, and holds more than that, is
the stream.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

_TOLERANCE = 0.02
"""Of a difference, relative to it."""


@dataclass(frozen=True, slots=True)
class StreamPlace:
    """A tensor that enters or leaves a module: (what does not depend on attention) + factor * (its
    contribution).

    Attributes:
        module: the module's name in the loaded model.
    """

    module: str
    enters: bool
    factor: float = 1.0


def find_stream(model: Any, layer: str, projection: str, run: Callable[[], Any]) -> StreamPlace:
    """The first place in a layer at which the contribution of an attention module is part of the
    residual stream.

    Args:
        model: the loaded model, in float32.
        layer: the layer's name in it.
        projection: the name of attention's output projection in it, whose output is the
            contribution.
        run: runs the layer, the same each time.

    Returns:
        The output of the projection itself if there is no such place in the layer, for example
        because the contribution is normed before it is added.
    """
    # the layer with attention's contribution, and without
    own = StreamPlace(projection, enters=False)
    whole = _trace(model, layer, run)
    with model.get_submodule(projection).register_forward_hook(
        lambda _, __, output: torch.zeros_like(output)
    ):
        without = _trace(model, layer, run)
    # the first tensor behind it that differs by a multiple of it
    start = [place for place, _ in whole].index(own)
    contribution = whole[start][1]
    for (place, one), (other_place, other) in zip(
        whole[start + 1 :], without[start + 1 :], strict=False
    ):
        if place != other_place:
            break  # experts are chosen otherwise
        if len(one) != len(contribution) or not other.any():
            continue
        difference = one - other
        factor = float(difference @ contribution / (contribution @ contribution))
        if factor and (difference - factor * contribution).norm() < _TOLERANCE * difference.norm():
            return replace(place, factor=1.0 if abs(factor - 1) < _TOLERANCE / 10 else factor)
    return own


def _trace(model: Any, layer: str, run: Callable[[], Any]) -> list[tuple[StreamPlace, Tensor]]:
    """What enters and leaves the modules of a layer in one run, in this order."""
    found: list[tuple[StreamPlace, Tensor]] = []

    def note(place: StreamPlace, value: Any) -> None:
        if isinstance(value, Tensor) and value.is_floating_point():
            found.append((place, value.detach().flatten().double()))

    with ExitStack() as hooks:
        for name, module in model.get_submodule(layer).named_modules(prefix=layer):
            for enters in (True, False):
                hooks.enter_context(
                    on_passing(module, enters, partial(note, StreamPlace(name, enters)))
                )
        run()
    return found


def on_passing(module: Any, enters: bool, arrive: Callable[[Any], None]) -> Any:
    """A hook that calls a function with the first tensor that enters, or that leaves, a module each
    time.
    """
    if enters:
        return module.register_forward_pre_hook(
            lambda _, args, kwargs: arrive(first_tensor((*args, *kwargs.values()))),
            with_kwargs=True,
        )
    return module.register_forward_hook(lambda _, __, output: arrive(first_tensor(output)))


def first_tensor(values: Any) -> Any:
    """The first tensor of a module's output or arguments; None if there is none."""
    if isinstance(values, Tensor):
        return values
    return next((value for value in values or () if isinstance(value, Tensor)), None)
