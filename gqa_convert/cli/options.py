"""How options are declared, those that several commands share, and the parsers of their values."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gqa_convert.errors import OptionError

if TYPE_CHECKING:
    from gqa_convert.measuring.sensitivity.kv_budget import KVBudget


def count(text: str) -> int:
    """Parse a number above 0, as of tokens, such as 4096, 4k or 2M.

    Raises:
        typer.BadParameter: the text is none.
    """
    from gqa_convert.data.keys import counted

    number = counted(text)
    if number is None or number.denominator != 1 or number < 1:
        raise typer.BadParameter(
            f"{text!r} is not a whole number above 0: write it like 8, 4096, 4k or 2M"
        )
    return int(number)


def counts(text: str) -> list[int]:
    """Parse numbers above 0 such as 1,2,4 or 4k,32k."""
    return [count(part) for part in text.split(",")]


def cache_budget(text: str) -> "KVBudget":
    """Parse a share such as "50%".

    Raises:
        typer.BadParameter: the text is none.
    """
    from gqa_convert.data.keys import counted
    from gqa_convert.measuring.sensitivity.kv_budget import KVBudget

    percent = counted(text.removesuffix("%"))
    if percent is None or not text.endswith("%"):
        raise typer.BadParameter(f"{text!r} is not a share: write it like 50%")
    return KVBudget(text, percent / 100)


def option(shown: str, text: str, default: Any = None, **more: Any) -> Any:
    """Declare an option or an argument.

    Args:
        shown: as `--help` shows it: its names, and what stands for its value if it takes one.
        text: its help.
        default: its value if it is not given; `...` where it must be, or where the parameter states
            it.
        more: what typer's function takes.
    """
    names, metavar = shown.split(), None
    if not names[-1].startswith("-"):
        metavar = names.pop()
    declare: Any = typer.Option if names else typer.Argument
    return declare(default, *names, metavar=metavar, help=text, **more)


def refuse(options: Mapping[str, Any], reason: str) -> None:
    """Refuse options that would have no effect, if they are given.

    Args:
        options: their values by name; None for an option that is not given.
        reason: a clause whose subject is the option.

    Raises:
        OptionError: an option is given.
    """
    for name, value in options.items():
        if value is not None:
            raise OptionError(f"{name} {reason}: leave it out")


def command_line() -> list[str]:
    """The command as the user gave it, for records."""
    return ["gqa-convert", *sys.argv[1:]]


Source = Annotated[str, option("SOURCE", "Checkpoint folder or Hub id.", ...)]
Converted = Annotated[Path, option("OUT", "Folder of the converted checkpoint.", ...)]
Budget = Annotated[
    Any,
    option(
        "--kv-budget SHARE",
        "The K/V cache to keep, as a share of that of SOURCE (50%): chooses a number of K/V heads "
        "for each layer of most decoders, by what merging costs it on the calibration text.",
        ...,
        parser=cache_budget,
    ),
]
Candidates = Annotated[
    Any,
    option(
        "--candidates N,N,...",
        "Numbers of K/V heads per layer to try. Default: divisors of the source's number.",
        ...,
        parser=counts,
    ),
]
Calibration = Annotated[
    list[str] | None,
    option(
        "--calibration -c TEXT",
        "Calibration text, conversations, or pairs with source and target for an encoder-decoder: "
        "a file, a folder, a glob pattern, a Hub dataset, or self for text that SOURCE writes; a "
        "folder of audio files for a model that hears. Repeat the option to mix texts in equal "
        "shares.",
        ...,
    ),
]
CalibrationTokens = Annotated[
    Any,
    option(
        "--calibration-tokens T",
        "Tokens of calibration text, such as 100k. Default: 24.6k, fewer for a hidden_size below "
        "50, and 8 per unit of hidden_size above 3,072.",
        ...,
        parser=count,
    ),
]
Device = Annotated[
    str | None,
    option(
        "--device NAME",
        "Where models run: cpu, cuda or cuda:1. Default: a GPU if there is one.",
        ...,
    ),
]
Revision = Annotated[
    str | None, option("--revision REV", "Branch, tag or commit on the Hub. Default: main.", ...)
]
Json = Annotated[bool, option("--json", "Print the result as one JSON object.", ...)]
