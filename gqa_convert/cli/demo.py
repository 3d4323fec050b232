"""`gqa-convert demo`."""

from pathlib import Path
from typing import Annotated

import typer

from .options import Json, Quiet


def demo(
    out: Annotated[Path, typer.Argument(metavar="[OUT]", help="Folder for the results.")] = Path("gqa-demo"),
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the results of an earlier demo in OUT.")
    ] = False,
    uptraining: Annotated[
        bool, typer.Option("--uptrain/--no-uptrain", help="Also uptrain one result with the source as teacher.")
    ] = True,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run the whole workflow on a small bundled model, offline, in about five minutes on two cores.

    The model is converted to several numbers of K/V heads, by mean pooling and by fitting on calibration text. Every
    result is verified, its loss and its K/V cache are measured, and one result is uptrained.

    Examples:

      gqa-convert demo
      gqa-convert demo /tmp/gqa-demo --no-uptrain --json
    """
    from gqa_convert.cli.console.demo import show_demo
    from gqa_convert.cli.console.plan import show_plan
    from gqa_convert.cli.console.progress import stage_progress
    from gqa_convert.cli.console.screen import print_json
    from gqa_convert.demo.run import UPTRAINING_TOKENS, run_demo

    with stage_progress(quiet=quiet) as step:
        summary = run_demo(
            out,
            overwrite=overwrite,
            uptraining_tokens=UPTRAINING_TOKENS if uptraining else 0,
            on_plan=(lambda made: None) if quiet or as_json else show_plan,
            progress=step,
        )
    if as_json:
        print_json(summary.as_json())
    elif not quiet:
        show_demo(summary)
    if not summary.passed:
        raise typer.Exit(1)
