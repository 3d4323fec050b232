"""Finds attention modules of a loaded model by their names in the checkpoint, and the layers they lie in."""

from collections.abc import Iterable, Sequence
from typing import Any

from gqa_convert.errors import ConfigError, UnsupportedFamilyError
from gqa_convert.families.table import family_of
from gqa_convert.families.wrappers import is_wrapper


def find_modules(model: Any, names: Sequence[str]) -> dict[str, str]:
    """The name of each module in the loaded model.

    Prefixes differ between files and memory (`h.0.attn` is loaded as `transformer.h.0.attn`). Therefore, the module
    whose name shares the longest end with the given one, including the layer's number, is the match. In a wrapper, only
    modules of the decoder inside count.

    Args:
        model: a loaded model.
        names: the modules' names in the checkpoint.

    Returns:
        The names in the loaded model by those in the checkpoint, in the given order.

    Raises:
        ConfigError: a name matches no module or several, or two names match the same module.
    """
    loaded = [name for name, _ in model.named_modules()]
    config = model.config.to_dict()
    if is_wrapper(config):
        family = family_of(config)
        loaded = [name for name in loaded if family.owns(name)]
    found: dict[str, str] = {}
    for name in names:
        matches: list[str] = []
        end = name
        while end and not matches:
            matches = [module for module in loaded if module == end or module.endswith(f".{end}")]
            end = end.partition(".")[2]
            if not any(part.isdecimal() for part in end.split(".")):
                end = ""
        if len(matches) != 1 or matches[0] in found.values():
            raise ConfigError(f"{name} is not one module of the loaded {type(model).__name__}")
        found[name] = matches[0]
    return found


def stacks_of(model: Any, names: Iterable[str]) -> list[str]:
    """The layers of every module list that holds one of the named modules.

    Raises:
        UnsupportedFamilyError: a module lies in no list.
    """
    from torch.nn import ModuleList

    stacks: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        ancestors = [".".join(parts[:count]) for count in range(1, len(parts))]
        lists = [ancestor for ancestor in ancestors if isinstance(model.get_submodule(ancestor), ModuleList)]
        if not lists:
            raise UnsupportedFamilyError(
                f"{name} is in no list of layers: it can't be calibrated; choose --method factor without calibration text"
            )
        stack = lists[0]
        stacks[stack] = [f"{stack}.{number}" for number in range(len(model.get_submodule(stack)))]
    return [layer for layers in stacks.values() for layer in layers]
