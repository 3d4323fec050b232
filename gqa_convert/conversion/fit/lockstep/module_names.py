"""Find the modules of a loaded model by the names that a checkpoint's tensors have."""

from collections.abc import Sequence
from typing import Any

from gqa_convert.errors import ConfigError


def find_modules(model: Any, names: Sequence[str]) -> dict[str, str]:
    """The loaded model's name of each module.

    Prefixes differ between files and memory (`h.0.attn` is loaded as `transformer.h.0.attn`), so the module is meant
    whose name ends like the wanted one for as many components as possible, the layer's number among them.

    Args:
        model: a loaded model.
        names: of modules, as the names of the checkpoint's tensors begin.

    Returns:
        The loaded model's name by the wanted name, in the order wanted.

    Raises:
        ConfigError: none is meant, or several are, or two names mean the same one.
    """
    by_end: dict[str, list[list[str]]] = {}
    for name, _ in model.named_modules():
        parts = name.split(".")
        by_end.setdefault(parts[-1], []).append(parts)
    found: dict[str, str] = {}
    for name in names:
        parts = name.split(".")
        lengths = [(_common_end(parts, other), other) for other in by_end.get(parts[-1], [])]
        numbers = [place for place, part in enumerate(reversed(parts), 1) if part.isdecimal()]
        longest = max((length for length, _ in lengths), default=0)
        best = [other for length, other in lengths if length == longest]
        if longest < (numbers[0] if numbers else 1) or len(best) != 1:
            raise ConfigError(
                f"{name} is {'no module' if len(best) != 1 or not longest else 'not found'} of the loaded {type(model).__name__}"
            )
        found[name] = ".".join(best[0])
    if len(set(found.values())) != len(found):
        raise ConfigError(f"two of {', '.join(names)} are the same module of the loaded {type(model).__name__}")
    return found


def _common_end(left: Sequence[str], right: Sequence[str]) -> int:
    """How many components two names share at their ends."""
    count = 0
    for one, other in zip(reversed(left), reversed(right), strict=False):
        if one != other:
            break
        count += 1
    return count
