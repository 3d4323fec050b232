"""The conversion that a command recommends to run next."""

import shlex
from collections.abc import Mapping


def conversion_command(source: str, out: str, groups: int, options: Mapping[str, object]) -> str:
    """The command line of a conversion.

    Args:
        source: the checkpoint.
        out: the folder of the result.
        groups: K/V heads per layer.
        options: by name. Those that are None or False are left out; an option is repeated for each item of a list, and
            has no value where it is True.
    """
    words = ["gqa-convert", "convert", source, out, "--groups", str(groups)]
    for name, value in options.items():
        if value is True:
            words.append(name)
        elif value is not None and value is not False:
            for each in value if isinstance(value, list | tuple) else [value]:
                words += [name, str(each)]
    return shlex.join(words)
