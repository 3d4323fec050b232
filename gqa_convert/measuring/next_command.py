"""The conversion that a command recommends to run next."""

import math
import shlex
from collections.abc import Mapping
from pathlib import Path

from gqa_convert.conversion.plan import Plan
from gqa_convert.families.layerwise import find_form


def conversion_command(source: str, out: str, groups: int, options: Mapping[str, object]) -> str:
    """The command line of a conversion.

    Args:
        source: the checkpoint.
        out: the folder of the result.
        groups: K/V heads per layer.
        options: by name. Those that are None or False are left out; an option is repeated for each item of a list, and
            has no value where it is True.
    """
    return _conversion(source, out, ["--groups", str(groups)], options)


def budget_command(source: str, plan: Plan, groups: int, options: Mapping[str, object]) -> str | None:
    """The command line of a conversion that spends the cache of one number for all layers layer by layer; None where
    layers may not differ.

    Args:
        source: the checkpoint.
        plan: of the source.
        groups: K/V heads per layer.
        options: as for `conversion_command`.
    """
    if plan.family.is_layerwise or isinstance(find_form(plan.family, plan.checkpoint.config), str):
        return None
    share = math.ceil(1000 * groups / plan.source_kv_heads) / 10
    out = f"{Path(source).absolute().name}-kv{share:.0f}"
    return _conversion(source, out, ["--kv-budget", f"{share:g}%"], options)


def _conversion(source: str, out: str, numbers: list[str], options: Mapping[str, object]) -> str:
    words = ["gqa-convert", "convert", source, out, *numbers]
    for name, value in options.items():
        if value is True:
            words.append(name)
        elif value is not None and value is not False:
            for each in value if isinstance(value, list | tuple) else [value]:
                words += [name, str(each)]
    return shlex.join(words)
