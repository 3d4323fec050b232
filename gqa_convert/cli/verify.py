"""`gqa-convert verify`."""

import gc
from pathlib import Path
from typing import Annotated

import typer

from .options import Json, Quiet, Revision


def verify(
    out: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="Folder of the converted checkpoint.", show_default=False),
    ],
    source: Annotated[
        str,
        typer.Option(
            "--source",
            metavar="SOURCE",
            help="Checkpoint that OUT was converted from: a folder or a Hub id.",
            show_default=False,
        ),
    ],
    revision: Revision = None,
    logits: Annotated[
        bool, typer.Option("--logits/--no-logits", help="Load both models and compare their outputs.")
    ] = True,
    text: Annotated[
        Path | None,
        typer.Option(
            "--text", metavar="FILE", help="Text on which to report the loss of both models.", show_default=False
        ),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Prove that OUT is SOURCE with merged K/V heads and no other change; exit with code 1 if it is not.

    Every tensor is compared or recomputed by code that is independent of the converter. Then both models are loaded,
    which needs memory for both, and OUT must compute what SOURCE computes with merged K/V heads. For factor,
    the attention functions of the weights are compared. For fit, which depends on its calibration text, the form is
    proven, and that OUT predicts more like SOURCE than mean pooling does, on --text or on random tokens.

    An uptrained checkpoint has other weights: verify the checkpoint that training started from.

    Examples:

      gqa-convert verify ./Llama-2-7b-gqa8 --source ./Llama-2-7b
      gqa-convert verify ./Llama-2-70b-gqa4 --source ./Llama-2-70b --no-logits
    """
    gc.disable()  # a search for garbage among the many objects of libraries finds none and takes a tenth of a second
    from gqa_convert.cli.console.progress import stage_progress
    from gqa_convert.cli.console.screen import print_json
    from gqa_convert.cli.console.verification import show_verification
    from gqa_convert.verify import verify_checkpoint

    gc.freeze()
    gc.enable()
    with stage_progress(quiet=quiet) as step:
        report = verify_checkpoint(out, source, revision=revision, logits=logits, text=text, progress=step)
    if as_json:
        print_json(report.summary())
    elif not quiet:
        show_verification(report.summary())
    if not report.passed:
        raise typer.Exit(1)
