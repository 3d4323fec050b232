"""The summary at the end of the demo."""

from gqa_convert.measuring.results.schemas import DemoFile, DemoUptraining, RecoveredLoss

from .screen import stdout_console, styled
from .tables import Column, show_table


def show_demo(summary: DemoFile) -> None:
    """Print the loss and the K/V cache of each N, by mean pooling and by fitting."""
    console = stdout_console()
    console.print(
        f"Loss in nats per token over {summary.held_out_tokens:,} held-out tokens, before uptraining; "
        f"fit used {summary.calibration_tokens:,} tokens of calibration text",
        soft_wrap=True,
    )
    headings = ("N", "K/V bytes per token", "parameters", "mean", "lost", "fit", "lost", "of mean's loss", "verified")
    rows = []
    base = summary.results[0].loss or 0.0
    for result in summary.results:
        loss, fit = result.loss or 0.0, result.fit
        lost = loss - base
        fitted = ("", "", "")
        if fit is not None and fit.loss is not None:
            fitted = (f"{fit.loss:.3f}", f"{fit.loss - base:+.3f}", f"{(fit.loss - base) / lost:.1%}")
        verified = all(each.verified for each in (result, fit or result))
        rows.append(
            [
                str(result.groups),
                f"{result.kv_bytes_per_token:,}",
                f"{result.parameters:,}",
                f"{loss:.3f}",
                f"{lost:+.3f}",
                *fitted,
                "yes" if verified else styled(("NO", "red")),
            ]
        )
    show_table([Column(heading, "right") for heading in headings], rows)
    if summary.uptraining:
        _show_recovery(summary.uptraining)
    console.print(f"results  {summary.results_file}", soft_wrap=True)
    plot = summary.plot or "not drawn, matplotlib is missing: pip install 'gqa-convert[plot]'"
    console.print(f"plot     {plot}", soft_wrap=True)


def _show_recovery(uptraining: DemoUptraining) -> None:
    """Print the loss after each part of the uptraining."""
    source = (uptraining.evaluation or RecoveredLoss()).source or 0.0
    console = stdout_console()
    console.print(
        f"Uptraining of the fitted N = {uptraining.groups} with the source as teacher, on {uptraining.alpha:.1%} of its training tokens "
        f"(source {source:.3f} on this part of the text)",
        soft_wrap=True,
    )
    rows = [
        [f"{point.tokens:,}", f"{point.loss:.3f}", f"{(point.loss or 0.0) - source:+.3f}"] for point in uptraining.curve
    ]
    show_table([Column(heading, "right") for heading in ("tokens", "loss", "lost")], rows)
