"""What the demo found."""

from typing import Any

from .screen import stdout_console, styled


def show_demo(summary: dict[str, Any]) -> None:
    """What each N loses and gains, by the mean and by fitting."""
    from rich.table import Table

    console = stdout_console()
    console.print(
        f"Loss in nats per token over {summary['held_out_tokens']:,} held-out tokens, nothing trained; "
        f"fit has seen {summary['calibration_tokens']:,} tokens of calibration text",
        soft_wrap=True,
    )
    table = Table("N", "K/V bytes per token", "parameters", "mean", "lost", "fit", "lost", "of mean's loss", "verified")
    base = summary["results"][0]["loss"]
    for result in summary["results"]:
        fit = result.get("fit")
        lost = result["loss"] - base
        fitted = (
            (f"{fit['loss']:.3f}", f"{fit['loss'] - base:+.3f}", f"{(fit['loss'] - base) / lost:.1%}")
            if fit
            else ("", "", "")
        )
        verified = all(each["verified"] for each in (result, fit or result))
        table.add_row(
            str(result["groups"]),
            f"{result['kv_bytes_per_token']:,}",
            f"{result['parameters']:,}",
            f"{result['loss']:.3f}",
            f"{lost:+.3f}",
            *fitted,
            "yes" if verified else styled(("NO", "red")),
        )
    console.print(table)
    if summary["uptraining"]:
        _show_recovery(summary["uptraining"])
    console.print(f"results  {summary['results_file']}", soft_wrap=True)
    plot = summary["plot"] or "not drawn, matplotlib is missing: pip install 'gqa-convert[plot]'"
    console.print(f"plot     {plot}", soft_wrap=True)


def _show_recovery(uptraining: dict[str, Any]) -> None:
    """What uptraining brought back, point by point."""
    from rich.table import Table

    source = uptraining["evaluation"]["source"]
    console = stdout_console()
    console.print(
        f"Uptraining of the fitted N = {uptraining['groups']} with the source as teacher, on {uptraining['alpha']:.1%} of its training tokens "
        f"(source {source:.3f} on this part of the text)",
        soft_wrap=True,
    )
    table = Table("tokens", "loss", "lost")
    for point in uptraining["curve"]:
        table.add_row(f"{point['tokens']:,}", f"{point['loss']:.3f}", f"{point['loss'] - source:+.3f}")
    console.print(table)
