"""Runs a module with substituted weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor


@contextmanager
def replaced(module: Any, parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """A context in which a module's parameters are replaced; gradients reach replacements that require them.

    Args:
        module: a torch module.
        parameters: the replacements by name inside the module; all others are kept.
    """
    homes = []
    for name, tensor in parameters.items():
        path, _, last = name.rpartition(".")
        home = module.get_submodule(path)._parameters
        homes.append((home, last, home.get(last)))  # `get` does not read offloaded weights
        home[last] = tensor
    try:
        yield
    finally:
        for home, last, own in homes:
            home[last] = own


@contextmanager
def wrapped_forward(module: Any, forward: Any) -> Iterator[None]:
    """A context in which a module's `forward` is replaced."""
    own = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
