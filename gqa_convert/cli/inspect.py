"""`gqa-convert inspect`."""

from pathlib import Path
from typing import Annotated

import typer

from .options import Calibration, CalibrationTokens, Json, Quiet, Revision, Source, counts


def inspect(
    source: Source,
    calibration: Calibration = None,
    calibration_tokens: CalibrationTokens = None,
    groups: Annotated[
        str | None,
        typer.Option(
            "--groups",
            "-n",
            metavar="N,N,...",
            help="Numbers to try; by default the head count's divisors, at most 6.",
            show_default=False,
        ),
    ] = None,
    max_loss_increase: Annotated[
        float | None,
        typer.Option(
            "--max-loss-increase", metavar="NATS", help="Per token, that N may cost. Default: 0.1.", show_default=False
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="FILE.png", help="Draw the errors, layer by layer; needs matplotlib.", show_default=False
        ),
    ] = None,
    encoder: Annotated[bool, typer.Option("--encoder", help="Look at an encoder's self-attention too.")] = False,
    revision: Revision = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the choice of calibration text.")] = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show what merging K/V heads would cost, layer by layer, and recommend an N. Nothing is converted.

    Keys and values of every layer are merged in memory by the closed form (method factor); stated is what they lose,
    and which pairs of heads merge most cheaply. With --calibration the source runs with merged heads on held-out text,
    which predicts the loss for each N: an upper bound, since [bold]convert --calibration[/bold] fits more closely.
    Without it only the weights are looked at: quick, and no prediction.

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
            seed=seed,
            encoder=encoder,
            revision=revision,
            plot=plot,
            progress=step,
        )
    if as_json:
        print_json(result)
    elif not quiet:
        show_inspection(result)
