"""Runs a module with weights other than its own."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor


@contextmanager
def replaced(module: Any, parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """Replaces a module's parameters within the context; gradients reach those that require them.

    Args:
        module: a torch module.
        parameters: by name inside the module; the others stay.
    """
    homes = []
    for name, tensor in parameters.items():
        path, _, last = name.rpartition(".")
        home = module.get_submodule(path)._parameters
        homes.append((home, last, home.get(last)))  # `get` reads no offloaded weight
        home[last] = tensor
    try:
        yield
    finally:
        for home, last, own in homes:
            home[last] = own


@contextmanager
def wrapped_forward(module: Any, forward: Any) -> Iterator[None]:
    """Replaces a module's `forward` within the context."""
    own = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
