"""Run a module with other weights than its own."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor


@contextmanager
def replaced(module: Any, parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """A module's parameters are these for a while; gradients flow to those that require them.

    Args:
        module: a torch module.
        parameters: by name inside the module; those left out stay.
    """
    homes = []
    for name, tensor in parameters.items():
        path, _, last = name.rpartition(".")
        home = module.get_submodule(path)._parameters
        homes.append((home, last, home.get(last)))  # which reads nothing from a disk
        home[last] = tensor
    try:
        yield
    finally:
        for home, last, own in homes:
            home[last] = own


@contextmanager
def wrapped_forward(module: Any, forward: Any) -> Iterator[None]:
    """A module's `forward` is another function for a while."""
    own = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
