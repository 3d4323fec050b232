"""Options that several commands share, and how their texts are read."""

import re
from typing import Annotated

import typer

from gqa_convert.errors import OptionError
from gqa_convert.merging.methods import method_help

Source = Annotated[str, typer.Argument(metavar="SOURCE", help="Checkpoint folder or Hub id.", show_default=False)]
Groups = Annotated[
    int,
    typer.Option(
        "--groups", "-n", metavar="N", help="K/V heads per layer in the result; 1 is multi-query.", show_default=False
    ),
]
Method = Annotated[
    str | None,
    typer.Option(
        "--method",
        "-m",
        show_default=False,
        help=method_help(),
    ),
]
Calibration = Annotated[
    str | None,
    typer.Option(
        "--calibration",
        "-c",
        metavar="TEXT",
        help="Text file, folder, pattern or Hub dataset to measure on.",
        show_default=False,
    ),
]
CalibrationTokens = Annotated[
    int | None,
    typer.Option(
        "--calibration-tokens",
        metavar="T",
        help="How much of it; by default from the model's width.",
        show_default=False,
    ),
]
Encoder = Annotated[
    bool,
    typer.Option(
        "--encoder", help="Convert an encoder's self-attention too. It has no cache; the GQA paper leaves it as it is."
    ),
]
Native = Annotated[
    bool | None,
    typer.Option(
        "--native/--no-native",
        show_default=False,
        help="For types without a K/V-head count: translate to a stock class that has one, or bring a modelling file. Default: what is possible.",
    ),
]
Revision = Annotated[
    str | None, typer.Option("--revision", help="Branch, tag or commit of a Hub id.", show_default=False)
]
Seed = Annotated[int, typer.Option("--seed", help="Of the choice of calibration text, and for --method random.")]
ShardSize = Annotated[
    str | None,
    typer.Option(
        "--max-shard-size",
        metavar="SIZE",
        help="Split the output anew, e.g. 5GB; without it files stay as in SOURCE.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only; with --json, the object too.")]


def byte_count(text: str | None, option: str) -> int | None:
    """ "5GB", "500 MiB" or a plain number of bytes."""
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([kKMGT]?)(i?)B?\s*", text)
    if match is None:
        raise OptionError(f"{option} {text!r} is no size: write it like 5GB or 500MiB")
    power = " KMGT".index(match[2].upper() or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def counts(text: str | None, option: str) -> list[int] | None:
    """ "1,2,4"."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise OptionError(f"{option} {text!r} is no list of numbers: write it like 1,2,4") from None
