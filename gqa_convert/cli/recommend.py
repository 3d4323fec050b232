"""`gqa-convert recommend`."""

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from gqa_convert.errors import OptionError

from .options import Calibration, CalibrationTokens, Json, Quiet, Revision, Source, byte_count, counts


def recommend(
    source: Source,
    calibration: Calibration = None,
    calibration_tokens: CalibrationTokens = None,
    max_loss_increase: Annotated[
        float | None,
        typer.Option(
            "--max-loss-increase", metavar="NATS", help="Per token over SOURCE's, that N may cost.", show_default=False
        ),
    ] = None,
    min_speedup: Annotated[
        float | None,
        typer.Option(
            "--min-speedup",
            metavar="FACTOR",
            help="Of a decode step over SOURCE's own, that N must reach.",
            show_default=False,
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            metavar="SIZE",
            help="For weights and K/V cache, e.g. 24GB; needs --context.",
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        str | None,
        typer.Option(
            "--context", metavar="T", help="Tokens in each sequence's cache, e.g. 32k or 32768.", show_default=False
        ),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", "-b", metavar="B", help="Sequences at once.")] = 1,
    encoder_tokens: Annotated[
        str | None,
        typer.Option(
            "--encoder-tokens",
            metavar="T",
            help="Input of an encoder-decoder. Default: as --context.",
            show_default=False,
        ),
    ] = None,
    groups: Annotated[
        str | None,
        typer.Option(
            "--groups",
            "-n",
            metavar="N,N,...",
            help="Numbers to choose from; by default the head count's divisors.",
            show_default=False,
        ),
    ] = None,
    results: Annotated[
        list[Path] | None,
        typer.Option(
            "--results",
            metavar="FOLDER_OR_FILE",
            show_default=False,
            help="What evaluate, inspect and benchmark wrote about SOURCE, in place of measuring again; may be given several times.",
        ),
    ] = None,
    revision: Revision = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the choice of calibration text.")] = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Choose N by what it may cost in loss, what it must gain in speed, or the memory that there is. Nothing is
    converted.

    Memory is counted exactly, decode steps are timed on this machine, and losses are predicted on calibration text: an
    upper bound, since [bold]convert --calibration[/bold] loses less. Asked for a loss alone, the answer is the smallest
    N; else the largest that meets all, since it loses least. If none does, the reason says what is in the way, and the
    exit code is 1.

      gqa-convert recommend ./Llama-2-7b --max-loss-increase 0.02 --calibration text.txt

      gqa-convert recommend ./Llama-2-7b --memory 24GB --context 4k --batch 16

      gqa-convert recommend ./Llama-2-7b --min-speedup 2 --context 4k --max-loss-increase 0.1 --calibration text.txt

      gqa-convert recommend ./Llama-2-7b --min-speedup 2 --max-loss-increase 0.02 --results ./runs
    """
    from gqa_convert.cli.console.progress import stage_progress
    from gqa_convert.cli.console.recommendation import show_recommendation
    from gqa_convert.cli.console.screen import print_json
    from gqa_convert.measuring.recommend import Constraints, recommend_groups

    constraints = Constraints(
        max_loss_increase=max_loss_increase,
        min_speedup=min_speedup,
        memory=byte_count(memory, "--memory"),
        context=_tokens(context, "--context"),
        batch=batch,
        encoder_tokens=_tokens(encoder_tokens, "--encoder-tokens"),
    )
    with stage_progress(quiet=quiet) as step:
        result = recommend_groups(
            source,
            constraints,
            calibration=calibration,
            calibration_tokens=calibration_tokens,
            groups=counts(groups, "--groups"),
            results=results or (),
            seed=seed,
            revision=revision,
            command=["gqa-convert", *sys.argv[1:]],
            progress=step,
        )
    if as_json:
        print_json(result)
    elif not quiet:
        show_recommendation(result)
    if result["groups"] is None:
        raise typer.Exit(1)


def _tokens(text: str | None, option: str) -> int | None:
    """ "32768" or "32k", which is the same."""
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d{1,12})\s*([kKM]?)\s*", text)
    if match is None:
        raise OptionError(f"{option} {text!r} is no number of tokens: write it like 32768 or 32k")
    return int(match[1]) << 10 * " KM".index(match[2].upper() or " ")
