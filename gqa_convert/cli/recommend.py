"""`gqa-convert recommend`."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from gqa_convert.errors import OptionError

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
    cache_budget,
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
    kv_budget: Annotated[
        str | None,
        typer.Option(
            "--kv-budget",
            metavar="SHARE,...",
            show_default=False,
            help="In place of limits: the K/V cache to keep, as shares of that of SOURCE (50%,25%) or in bytes per token. Recommends a number for each layer, for the types whose layers may differ.",
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

    With --kv-budget, each layer gets its own number, as in [bold]convert --kv-budget[/bold], and the divergence from
    SOURCE is shown beside that of one N for all layers.

    Examples:

      gqa-convert recommend ./Llama-2-7b --max-loss-increase 0.02 --calibration text.txt
      gqa-convert recommend ./Llama-2-7b --memory 24GB --context 4k --batch 16
      gqa-convert recommend ./Llama-2-7b --min-speedup 2 --context 4k --max-loss-increase 0.1 --calibration text.txt
      gqa-convert recommend ./Llama-2-7b --min-speedup 2 --max-loss-increase 0.02 --results ./runs
      gqa-convert recommend ./Llama-2-7b --kv-budget 50%,25% --calibration text.txt
    """
    from gqa_convert.cli.console.progress import stage_progress
    from gqa_convert.cli.console.recommendation import show_recommendation
    from gqa_convert.cli.console.screen import print_json
    from gqa_convert.measuring.recommend import Constraints, recommend_groups

    if kv_budget is not None:
        limits = {
            "--max-loss-increase": max_loss_increase,
            "--min-speedup": min_speedup,
            "--memory": memory,
            "--context": context,
            "--groups": groups,
            "--results": results,
        }
        if other := next((name for name, value in limits.items() if value is not None), None):
            raise OptionError(
                f"--kv-budget and {other} exclude each other: a budget chooses the number of K/V heads of each layer"
            )
        _recommend_within(
            kv_budget,
            source,
            calibration=calibration,
            calibration_tokens=calibration_tokens,
            seed=seed,
            revision=revision,
            as_json=as_json,
            quiet=quiet,
        )
        return
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


def _recommend_within(kv_budget: str, source: str, *, as_json: bool, quiet: bool, **options: Any) -> None:
    from gqa_convert.cli.console.budget import show_choice
    from gqa_convert.cli.console.progress import stage_progress
    from gqa_convert.cli.console.screen import print_json
    from gqa_convert.measuring.recommend.budgets import recommend_within

    budgets = [budget for part in kv_budget.split(",") if (budget := cache_budget(part)) is not None]
    with stage_progress(quiet=quiet) as step:
        made, choices = recommend_within(
            source, budgets, command=["gqa-convert", *sys.argv[1:]], progress=step, **options
        )
    if as_json:
        print_json(made.as_json())
    elif not quiet:
        for choice, following in zip(choices, made.next, strict=True):
            show_choice(choice, following or "")
