"""Options that several commands share, and the parsers of their values."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gqa_convert.errors import OptionError
from gqa_convert.merging.methods import method_help

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


Source = Annotated[str, typer.Argument(metavar="SOURCE", help="Checkpoint folder or Hub id.", show_default=False)]
NewFolder = Annotated[
    Path,
    typer.Argument(
        metavar="OUT", help="New folder for the result; it appears whole or not at all.", show_default=False
    ),
]
Converted = Annotated[
    Path, typer.Argument(metavar="OUT", help="Folder of the converted checkpoint.", show_default=False)
]
Groups = Annotated[
    str | None,
    typer.Option(
        "--groups",
        "-n",
        metavar="N",
        help="K/V heads per layer in the result; 1 is multi-query attention. Of a Llama, Mistral or Qwen2 also a list such as 8,8,4,4, one number per layer.",
        show_default=False,
    ),
]
GroupsFile = Annotated[
    Path | None,
    typer.Option(
        "--groups-file",
        metavar="FILE",
        help="In place of --groups: a file with one number per layer, as a JSON list or one per line.",
        show_default=False,
    ),
]
Budget = Annotated[
    str | None,
    typer.Option(
        "--kv-budget",
        metavar="SHARE",
        help="The K/V cache to keep, as a share of that of SOURCE (50%) or in bytes per token (64KiB): chooses a number of K/V heads for each layer of most decoders, by what merging costs it on the calibration text.",
        show_default=False,
    ),
]
Candidates = Annotated[
    str | None,
    typer.Option(
        "--candidates",
        metavar="N,N,...",
        help="Numbers of K/V heads per layer to try. Default: divisors of the source's number.",
        show_default=False,
    ),
]
SeveralGroups = Annotated[
    str | None,
    typer.Option(
        "--groups",
        "-n",
        metavar="N,N,...",
        help="Numbers of K/V heads to consider. Default: divisors of the source's number.",
        show_default=False,
    ),
]
Method = Annotated[
    str | None,
    typer.Option(
        "--method",
        "-m",
        metavar="NAME",
        show_default=False,
        help=method_help(),
    ),
]
Calibration = Annotated[
    list[str] | None,
    typer.Option(
        "--calibration",
        "-c",
        metavar="TEXT",
        help="Calibration text or conversations: a file, a folder, a glob pattern, a Hub dataset, or self for text that SOURCE writes. Repeat the option to mix texts in equal shares.",
        show_default=False,
    ),
]
CalibrationTokens = Annotated[
    int | None,
    typer.Option(
        "--calibration-tokens",
        metavar="T",
        parser=token_count,
        help="Tokens of calibration text. Default: 24,576, fewer for a hidden_size below 50, and 8 per unit of hidden_size above 3,072.",
        show_default=False,
    ),
]
CalibrationLength = Annotated[
    int | None,
    typer.Option(
        "--calibration-length",
        metavar="L",
        parser=token_count,
        help="Tokens per block of calibration text. Default: the model's context, at most 1,024.",
        show_default=False,
    ),
]
CalibrationContext = Annotated[
    int | None,
    typer.Option(
        "--calibration-context",
        metavar="P",
        parser=token_count,
        help="Position up to which every second block of calibration text skips, for long contexts at no cost. Default: the model's context, at most 32,768.",
        show_default=False,
    ),
]
FitSteps = Annotated[
    int | None,
    typer.Option(
        "--fit-steps",
        metavar="S",
        help="Gradient steps per layer of fit; 0 uses the closed forms only. Default: 100.",
        show_default=False,
    ),
]
KLSteps = Annotated[
    int | None,
    typer.Option(
        "--kl-steps",
        metavar="S",
        show_default=False,
        help="Steps of fit's last stage, which trains all layers together. Default: twice --fit-steps if the model fits in memory and lost 0.02 nats per token or more, else 0.",
    ),
]
KLRank = Annotated[
    int | None,
    typer.Option(
        "--kl-rank",
        metavar="R",
        show_default=False,
        help="Rank of the changes that fit's last stage makes to query and output projections, to take less memory; 0 trains these as they are. Default: 0 if memory allows, else 32.",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME",
        help="Where calibration runs: cpu, cuda or cuda:1. Default: a GPU if there is one.",
        show_default=False,
    ),
]
Devices = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAMES",
        help="Where calibration runs: cpu, cuda or cuda:1; on several GPUs: cuda:0,cuda:1 or cuda:all. Default: a GPU if there is one.",
        show_default=False,
    ),
]
Encoder = Annotated[
    bool,
    typer.Option(
        "--encoder",
        help="Also merge heads of the encoder's self-attention. It has no K/V cache, and the GQA paper does not convert it.",
    ),
]
Native = Annotated[
    bool | None,
    typer.Option(
        "--native/--no-native",
        show_default=False,
        help="For model types without a K/V-head count: translate to a stock class that has one, or add a modelling file to the result. Default: translate if possible.",
    ),
]
Revision = Annotated[
    str | None,
    typer.Option(
        "--revision", metavar="REV", help="Branch, tag or commit on the Hub. Default: main.", show_default=False
    ),
]
Seed = Annotated[int, typer.Option("--seed", metavar="S", help="Seed for the sample of calibration text.")]
ShardSize = Annotated[
    str | None,
    typer.Option(
        "--max-shard-size",
        metavar="SIZE",
        help="Largest weight file of the result, for example 5GB. Default: the files of SOURCE.",
        show_default=False,
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE.png", help="Also draw the result; needs matplotlib.", show_default=False),
]
ReplaceResult = Annotated[
    bool, typer.Option("--overwrite", help="Replace an earlier result in OUT once the new one is complete.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only, and the JSON object with --json.")]


def byte_count(text: str | None, option: str) -> int | None:
    """Parse a size such as "5GB", "500 MiB" or "1000" into bytes; None stays None."""
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([kKMGT]?)(i?)B?\s*", text)
    if match is None:
        raise OptionError(f"{option} {text!r} is not a size: write it like 5GB or 500MiB")
    power = " KMGT".index(match[2].upper() or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def cache_budget(text: str | None) -> "KVBudget | None":
    """Parse `--kv-budget`: a share such as "50%" or "0.5", or bytes per token such as "64KiB"; None stays None."""
    if text is None:
        return None
    from fractions import Fraction

    from gqa_convert.measuring.sensitivity.kv_budget import KVBudget

    if percent := re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*%\s*", text, re.ASCII):
        return KVBudget(text.strip(), share=Fraction(percent[1]) / 100)
    if share := re.fullmatch(r"\s*([01]|[01]?\.\d{1,9})\s*", text, re.ASCII):
        return KVBudget(text.strip(), share=Fraction(share[1]))
    try:
        return KVBudget(text.strip(), nbytes=byte_count(text, "--kv-budget"))
    except OptionError:
        raise OptionError(
            f"--kv-budget {text!r} is neither a share nor a number of bytes: write it like 50%, 0.5 or 64KiB"
        ) from None


def check_one_choice_of_groups(groups: str | None, file: Path | None, budget: str | None) -> None:
    """Check that the numbers of K/V heads are given, or a budget for choosing them, but not both.

    Raises:
        OptionError: they are not.
    """
    other = "--groups" if groups is not None else None if file is None else "--groups-file"
    if budget is not None and other is not None:
        raise OptionError(
            f"--kv-budget and {other} exclude each other: a budget chooses the number of K/V heads of each layer"
        )
    if budget is None and other is None:
        raise OptionError(
            "--groups is missing: give the number of K/V heads per layer, a file with one for each layer (--groups-file), "
            "or the K/V cache to keep (--kv-budget)"
        )


def group_counts(text: str | None, file: Path | None) -> int | list[int]:
    """Parse `--groups` or read `--groups-file`: one number for all layers, or a list with one for each layer.

    Raises:
        OptionError: neither or both are given, the file cannot be read, or what is given is not a number or a list of
            numbers.
    """
    if (text is None) == (file is None):
        problem = "is missing" if text is None else "and --groups-file exclude each other"
        raise OptionError(
            f"--groups {problem}: give the number of K/V heads per layer, or a file with one for each layer"
        )
    if file is None:
        assert text is not None
        return (
            _integer(text, "--groups") if "," not in text else [_integer(part, "--groups") for part in text.split(",")]
        )
    try:
        content = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise OptionError(f"--groups-file {file} cannot be read ({problem}): name a text file") from None
    option = f"--groups-file {file}:"
    if content.lstrip().startswith("["):
        try:
            listed = json.loads(content)
        except ValueError as problem:
            raise OptionError(f"{option} not JSON ({problem}): write it like [8, 8, 4, 4]") from None
        return [_integer(json.dumps(each), option) for each in listed]
    found = [_integer(line, option) for line in content.splitlines() if line.strip()]
    if not found:
        raise OptionError(f"{option} no number: write one for each layer, one per line")
    return found


def _integer(text: str, option: str) -> int:
    if not re.fullmatch(r"\s*-?\d{1,9}\s*", text, re.ASCII):
        raise OptionError(f"{option} {text.strip()!r} is not an integer: write one number, or a list such as 8,8,4,4")
    return int(text)


def counts(text: str | None, option: str) -> list[int] | None:
    """Parse a list of numbers such as "1,2,4"; None stays None."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise OptionError(f"{option} {text!r} is not a list of numbers: write it like 1,2,4") from None


def interpreters(pairs: list[str] | None) -> dict[str, str]:
    """Parse pairs such as "vllm=/opt/vllm/bin/python": an engine and the interpreter that has it."""
    found = {}
    for pair in pairs or ():
        name, _, path = pair.partition("=")
        if not (name and path):
            raise OptionError(f"--python {pair!r} is not NAME=PATH: write it like vllm=/opt/vllm/bin/python")
        found[name] = path
    return found
