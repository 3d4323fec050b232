"""Finds attention modules of a loaded model by their names in the checkpoint, and the stacks of layers they lie in."""

from collections.abc import Iterable, Sequence
from typing import Any

from gqa_convert.errors import ConfigError, UnsupportedFamilyError
from gqa_convert.families.table import family_of
from gqa_convert.families.wrappers import is_wrapper


def find_modules(model: Any, names: Sequence[str]) -> dict[str, str]:
    """The name of each module in the loaded model.

    Prefixes differ between files and memory (`h.0.attn` is loaded as `transformer.h.0.attn`). Therefore, the module
    whose name shares the longest suffix of components, including the layer's number, is the match. In a wrapper, only
    modules of the decoder inside count.

    Args:
        model: a loaded model.
        names: the modules' names in the checkpoint.

    Returns:
        The names in the loaded model by those in the checkpoint, in the given order.

    Raises:
        ConfigError: a name matches no module or several, or two names match the same module.
    """
    config = model.config.to_dict()
    family = family_of(config) if is_wrapper(config) else None
    candidates: dict[str, list[str]] = {}
    for loaded, _ in model.named_modules():
        if family is None or family.owns(loaded):
            candidates.setdefault(loaded.rpartition(".")[2], []).append(loaded)
    found: dict[str, str] = {}
    for name in names:
        lengths = {loaded: _common_end(name, loaded) for loaded in candidates.get(name.rpartition(".")[2], [])}
        longest = max(lengths.values(), default=0)
        best = [loaded for loaded, length in lengths.items() if length == longest]
        if longest < _length_from_number(name) or len(best) != 1:
            raise ConfigError(f"{name} is not one module of the loaded {type(model).__name__}")
        found[name] = best[0]
    if len(set(found.values())) != len(found):
        raise ConfigError(f"two of {', '.join(names)} are the same module of the loaded {type(model).__name__}")
    return found


def _length_from_number(name: str) -> int:
    """How many components a name has from the layer's number on; 1 where it has no number."""
    parts = name.split(".")
    for length, part in enumerate(reversed(parts), start=1):
        if part.isdecimal():
            return length
    return 1


def _common_end(left: str, right: str) -> int:
    """The number of components that two names share at their ends."""
    count = 0
    for one, other in zip(reversed(left.split(".")), reversed(right.split(".")), strict=False):
        if one != other:
            break
        count += 1
    return count


def layer_of(model: Any, name: str) -> str:
    """The layer that a module lies in: its outermost ancestor that is an element of a module list.

    Args:
        model: a loaded model.
        name: of the module in the loaded model.

    Raises:
        UnsupportedFamilyError: it lies in no list.
    """
    from torch.nn import ModuleList

    parts = name.split(".")
    for count in range(1, len(parts)):
        if isinstance(model.get_submodule(".".join(parts[:count])), ModuleList):
            return ".".join(parts[: count + 1])
    raise UnsupportedFamilyError(f"{name} is in no list of layers: {_ADVICE}")


def stacks_of(model: Any, names: Iterable[str]) -> dict[str, list[str]]:
    """The layers of every module list that holds one of the named modules, by the list's name."""
    stacks: dict[str, list[str]] = {}
    for name in names:
        stack = layer_of(model, name).rpartition(".")[0]
        layers = range(len(model.get_submodule(stack)))
        stacks[stack] = [f"{stack}.{number}" for number in layers]
    return stacks


_ADVICE = "it can't be calibrated; choose --method factor without calibration text"
