"""Options that several commands share, and the parsers of their values."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gqa_convert.errors import OptionError

if TYPE_CHECKING:
    from gqa_convert.measuring.sensitivity.kv_budget import KVBudget


def token_count(text: str) -> int:
    """Parse a number of tokens such as 4096, 4k or 2M.

    Raises:
        typer.BadParameter: the text is no whole number of tokens.
    """
    from gqa_convert.text.scalars import counted

    number = counted(text)
    if number is None or number.denominator != 1:
        raise typer.BadParameter(f"{text!r} is not a number of tokens: write it like 4096, 4k or 2M")
    return int(number)


def token_counts(text: str) -> list[int]:
    """Parse numbers of tokens such as 4k,32k."""
    return [token_count(part) for part in text.split(",")]


def counts(text: str) -> list[int]:
    """Parse a list of numbers such as "1,2,4".

    Raises:
        typer.BadParameter: the text is no such list.
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of numbers: write it like 1,2,4") from None


def hidden_option(name: str, metavar: str | None, text: str, **options: Any) -> Any:
    """Declare an option that `--help` leaves out and `--help-all` shows."""
    return typer.Option(name, metavar=metavar, help=text, hidden=True, **options)


Source = Annotated[str, typer.Argument(metavar="SOURCE", help="Checkpoint folder or Hub id.")]
Converted = Annotated[Path, typer.Argument(metavar="OUT", help="Folder of the converted checkpoint.")]
Budget = Annotated[
    str | None,
    typer.Option(
        "--kv-budget",
        metavar="SHARE",
        help="The K/V cache to keep, as a share of that of SOURCE (50%) or in bytes per token (64KiB): chooses a number of K/V heads for each layer of most decoders, by what merging costs it on the calibration text.",
    ),
]
Candidates = Annotated[
    Any,
    typer.Option(
        "--candidates",
        metavar="N,N,...",
        parser=counts,
        help="Numbers of K/V heads per layer to try. Default: divisors of the source's number.",
    ),
]
Calibration = Annotated[
    list[str] | None,
    typer.Option(
        "--calibration",
        "-c",
        metavar="TEXT",
        help="Calibration text or conversations: a file, a folder, a glob pattern, a Hub dataset, or self for text that SOURCE writes; a folder of audio files for a model that hears. Repeat the option to mix texts in equal shares.",
        show_default=False,
    ),
]
CalibrationTokens = Annotated[
    int | None,
    typer.Option(
        "--calibration-tokens",
        metavar="T",
        parser=token_count,
        help="Tokens of calibration text, such as 100k. Default: 24.6k, fewer for a hidden_size below 50, and 8 per unit of hidden_size above 3,072.",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device", metavar="NAME", help="Where models run: cpu, cuda or cuda:1. Default: a GPU if there is one."
    ),
]
Revision = Annotated[
    str | None, typer.Option("--revision", metavar="REV", help="Branch, tag or commit on the Hub. Default: main.")
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace an earlier result in OUT once the new one is complete.")
]
Interpreters = Annotated[
    list[str] | None,
    typer.Option(
        "--python",
        metavar="NAME=PATH",
        help="Python interpreter of the environment that has an engine, such as vllm=/opt/vllm/bin/python.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", hidden=True, help="Print errors only, and the JSON object with --json.")
]


def byte_count(text: str | None, option: str) -> int | None:
    """Parse a size of memory such as "5GB", "500 MiB" or "1000" into bytes; None stays None."""
    from gqa_convert.text.scalars import counted

    if text is None:
        return None
    number = counted(text.strip().removesuffix("B"))
    if number is None or number < 0:
        raise OptionError(f"{option} {text!r} is not a size: write it like 5GB or 500MiB")
    return int(number)


def cache_budget(text: str | None) -> "KVBudget | None":
    """Parse `--kv-budget`: a share such as "50%", or bytes per token such as "64KiB"; None stays None."""
    if text is None:
        return None
    from gqa_convert.measuring.sensitivity.kv_budget import KVBudget
    from gqa_convert.text.scalars import counted

    percent = counted(text.partition("%")[0])
    if text.endswith("%") and percent is not None and percent >= 0:
        return KVBudget(text, share=percent / 100)
    return KVBudget(text, nbytes=byte_count(text, "--kv-budget"))


def interpreters(pairs: list[str] | None) -> dict[str, str]:
    """Parse pairs such as "vllm=/opt/vllm/bin/python": an engine and the interpreter that has it."""
    found = {}
    for pair in pairs or ():
        name, _, path = pair.partition("=")
        if not (name and path):
            raise OptionError(f"--python {pair!r} is not NAME=PATH: write it like vllm=/opt/vllm/bin/python")
        found[name] = path
    return found
