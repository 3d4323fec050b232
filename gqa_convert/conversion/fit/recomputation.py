"""Recomputation of layers in the backward pass, which needs less memory and another forward pass."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from gqa_convert.conversion.fit.attention_calls import wrapped_forward
from gqa_convert.conversion.fit.module_names import layer_of


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
    """The layers of a model in which modules lie.

    Args:
        model: a torch module.
        names: of modules inside it.
    """
    return [model.get_submodule(layer) for layer in dict.fromkeys(layer_of(model, name) for name in names)]


def _recomputing(forward: Any) -> Any:
    def wrapped(*arguments: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments, **options)
        return checkpoint(forward, *arguments, use_reentrant=False, preserve_rng_state=False, **options)

    return wrapped
