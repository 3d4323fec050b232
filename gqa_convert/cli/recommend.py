"""`gqa-convert recommend`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from .options import (
    Batch,
    Calibration,
    CalibrationSeed,
    CalibrationTokens,
    Json,
    Quiet,
    Revision,
    SeveralGroups,
    Source,
    byte_count,
    counts,
    token_count,
)


def recommend(
    source: Source,
    calibration: Calibration = None,
    calibration_tokens: CalibrationTokens = None,
    max_loss_increase: Annotated[
        float | None,
        typer.Option(
            "--max-loss-increase",
            metavar="NATS",
            help="Largest loss increase over SOURCE, in nats per token.",
            show_default=False,
        ),
    ] = None,
    min_speedup: Annotated[
        float | None,
        typer.Option(
            "--min-speedup",
            metavar="FACTOR",
            help="Smallest speedup of a decode step over SOURCE, for example 1.5.",
            show_default=False,
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            metavar="SIZE",
            help="Memory for weights and K/V cache, for example 24GB; needs --context.",
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        str | None,
        typer.Option(
            "--context",
            metavar="T",
            help="Tokens in the K/V cache of each sequence, for example 32k or 32768.",
            show_default=False,
        ),
    ] = None,
    batch: Batch = 1,
    encoder_tokens: Annotated[
        str | None,
        typer.Option(
            "--encoder-tokens",
            metavar="T",
            help="Tokens of an encoder-decoder's input. Default: those of --context.",
            show_default=False,
        ),
    ] = None,
    groups: SeveralGroups = None,
    results: Annotated[
        list[Path] | None,
        typer.Option(
            "--results",
            metavar="PATH",
            show_default=False,
            help="JSON of evaluate, inspect or benchmark about SOURCE, or a folder with it, to use instead of measuring again; repeatable.",
        ),
    ] = None,
    revision: Revision = None,
    seed: CalibrationSeed = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Choose a number of K/V heads N from limits on loss, speed and memory, without converting anything.

    At least one of --max-loss-increase, --min-speedup and --memory is needed. Memory is computed from the shapes,
    decode steps are timed on this machine, and the losses that remain after [bold]convert --calibration[/bold] are
    predicted on calibration text, with an interval whose upper end counts for the limit. With a limit on the loss
    alone, the smallest N that meets it is recommended; otherwise the largest N that meets all limits, which loses
    least. If no N does, the exit code is 1 and the reason names the limit that fails.

    Examples:

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
        context=token_count(context, "--context"),
        batch=batch,
        encoder_tokens=token_count(encoder_tokens, "--encoder-tokens"),
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
        print_json(result.as_json())
    elif not quiet:
        show_recommendation(result)
    if result.groups is None:
        raise typer.Exit(1)
