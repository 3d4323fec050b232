"""`gqa-convert verify`."""

import typer

from .options import Converted, Json, Revision, option


def verify(
    out: Converted,
    source: str | None = option(
        "--source SOURCE",
        "Checkpoint that OUT was converted from: a folder or a Hub id. Default: the one that its "
        "record names.",
    ),
    revision: Revision = None,
    logits: bool = option(
        "--logits/--no-logits", "Load both models and compare their outputs.", True
    ),
    as_json: Json = False,
) -> None:
    """Prove that OUT is SOURCE with merged K/V heads and no other change.

    Every tensor is compared or recomputed by code that is independent of the converter. Then both
    models are loaded, one at a time, and OUT must compute what SOURCE computes with OUT's heads
    repeated. In a result of factor or fit, no attention module may be far worse than with mean
    pooling. The exit code is 1 if a check fails.

    An uptrained checkpoint has other weights: verify the checkpoint that training started from. A
    source that convert has rewritten first is rewritten again, in a folder beside OUT that goes
    afterwards.

      gqa-convert verify ./gqa8
      gqa-convert verify ./gqa4 --source ./Llama-2-70b --no-logits
    """
    from gqa_convert.verify import verify_checkpoint

    from .console.screen import ProgressScreen, print_json, say

    with ProgressScreen() as screen:
        report = verify_checkpoint(
            out,
            source,
            revision=revision,
            logits=logits,
            on_note=lambda note: screen.say(f"note: {note}"),
            progress=screen.show,
        )
    if as_json:
        print_json(report.summary())
    else:
        for check in report.checks:
            say(f"{'ok  ' if check.passed else 'FAIL'}  {check.name:<22} {check.detail}")
        verdict = "verified"
        if not report.passed:
            verdict = (
                "not verified: OUT is not SOURCE with merged K/V heads; do not use it, unless it "
                "was uptrained after the conversion"
            )
        say(verdict)
    if not report.passed:
        raise typer.Exit(1)
