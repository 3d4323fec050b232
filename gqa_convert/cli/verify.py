"""`gqa-convert verify`."""

from pathlib import Path
from typing import Annotated

import typer

from .options import Json, Quiet, Revision


def verify(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The converted checkpoint.", show_default=False)],
    source: Annotated[
        str,
        typer.Option(
            "--source", metavar="SOURCE", help="What it was made from: a folder or a Hub id.", show_default=False
        ),
    ],
    revision: Revision = None,
    logits: Annotated[
        bool, typer.Option("--logits/--no-logits", help="Also load both models and compare what they compute.")
    ] = True,
    text: Annotated[
        Path | None,
        typer.Option("--text", metavar="FILE", help="Also report both models' loss on this text.", show_default=False),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Prove that OUT is SOURCE with its K/V heads merged, and nothing else. Exit code 1 if it is not.

    A checkpoint that was uptrained since has numbers of its own: verify what it was trained from.

    Every tensor is compared or recomputed, by code that shares nothing with the converter; then both models are loaded
    and OUT must compute what SOURCE computes once its K/V heads are replaced by the merged ones. Methods align and
    factor are proven by what attention computes from the weights. Of fit, which depends on its text, only the form is
    proven, and that OUT predicts more like SOURCE than mean pooling would, on the text or on random tokens.

      gqa-convert verify ./Llama-2-7b-gqa8 --source ./Llama-2-7b
      gqa-convert verify ./Llama-2-70b-gqa4 --source ./Llama-2-70b --no-logits
    """
    from gqa_convert.cli.console.progress import stage_progress
    from gqa_convert.cli.console.screen import print_json
    from gqa_convert.cli.console.verification import show_verification
    from gqa_convert.verify import verify_checkpoint

    with stage_progress(quiet=quiet) as step:
        report = verify_checkpoint(out, source, revision=revision, logits=logits, text=text, progress=step)
    if as_json:
        print_json(report.summary())
    elif not quiet:
        show_verification(report.summary())
    if not report.passed:
        raise typer.Exit(1)
