"""`gqa-convert inspect`."""

from typing import Annotated

import typer

from .options import (
    Calibration,
    CalibrationSeed,
    CalibrationTokens,
    Device,
    Json,
    Plot,
    Quiet,
    Revision,
    SeveralGroups,
    Source,
    counts,
)


def inspect(
    source: Source,
    calibration: Calibration = None,
    calibration_tokens: CalibrationTokens = None,
    groups: SeveralGroups = None,
    max_loss_increase: Annotated[
        float | None,
        typer.Option(
            "--max-loss-increase",
            metavar="NATS",
            help="Largest loss increase, in nats per token, of the recommended N. Default: 0.1.",
            show_default=False,
        ),
    ] = None,
    device: Device = None,
    plot: Plot = None,
    encoder: Annotated[bool, typer.Option("--encoder", help="Also inspect the encoder's self-attention.")] = False,
    revision: Revision = None,
    seed: CalibrationSeed = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show what merging K/V heads would cost in every layer, and recommend a number of K/V heads N.

    Nothing is converted: keys and values are merged in memory with method factor. The table shows their relative error
    and which pairs of heads are cheapest to merge. With --calibration, the source also runs with merged heads on
    held-out text, and short fits of a few layers give an estimate, with an interval, which predicts the loss that
    remains after convert --calibration. Without it, only the weights are read, which is fast but predicts
    no loss. By default at most six divisors are tried.

    Examples:

      gqa-convert inspect ./Llama-2-7b --calibration text.txt
      gqa-convert inspect ./Llama-2-7b --calibration text.txt --groups 4,8,16 --max-loss-increase 0.05 --plot errors.png
      gqa-convert inspect ./flan-t5-xl --json
    """
    from gqa_convert.cli.console.inspection import show_inspection
    from gqa_convert.cli.console.progress import stage_progress
    from gqa_convert.cli.console.screen import print_json
    from gqa_convert.measuring.inspect.run import inspect_checkpoint

    with stage_progress(quiet=quiet) as step:
        result = inspect_checkpoint(
            source,
            calibration=calibration,
            calibration_tokens=calibration_tokens,
            groups=counts(groups, "--groups"),
            max_loss_increase=max_loss_increase,
            device=device,
            seed=seed,
            encoder=encoder,
            revision=revision,
            plot=plot,
            progress=step,
        )
    if as_json:
        print_json(result.as_json())
    elif not quiet:
        show_inspection(result)
