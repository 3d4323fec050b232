"""Recomputation of layers in the backward pass, which needs less memory and another forward pass."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from gqa_convert.conversion.fit.lockstep import wrapped_forward


@contextmanager
def recomputed(layers: Iterable[Any]) -> Iterator[None]:
    """A context in which layers keep only their inputs for the backward pass and compute the rest again in it (Chen et al.
    2016, *Training Deep Nets with Sublinear Memory Cost*, section 4). The backward pass belongs into the context too.

    Args:
        layers: torch modules, none inside another.
    """
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(wrapped_forward(layer, _recomputing(layer.forward)))
        yield


def layers_of(model: Any, names: Iterable[str]) -> list[Any]:
    """The layers of a model in which modules lie: for each, its outermost ancestor that is an element of a list. A module
    outside all lists stands for itself.

    Args:
        model: a torch module.
        names: of modules inside it.
    """
    found = {}
    for name in names:
        parts = name.split(".")
        parents = (".".join(parts[:count]) for count in range(len(parts)))
        inside = (count for count, parent in enumerate(parents) if _is_list(model.get_submodule(parent)))
        path = ".".join(parts[: next(inside, len(parts) - 1) + 1])
        found[path] = model.get_submodule(path)
    return list(found.values())


def _is_list(module: Any) -> bool:
    return isinstance(module, torch.nn.ModuleList)


def _recomputing(forward: Any) -> Any:
    def wrapped(*arguments: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments, **options)
        return checkpoint(forward, *arguments, use_reentrant=False, preserve_rng_state=False, **options)

    return wrapped
