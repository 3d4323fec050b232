"""`gqa-convert demo`."""

from pathlib import Path
from typing import Any

import typer

from .options import Json, Quiet


def demo(out: Path = Path("gqa-demo"), as_json: Json = False, quiet: Quiet = False) -> None:
    """Try the whole workflow on a small bundled model, offline, in a few minutes on two cores.

    A quarter of the model's K/V heads are kept, by mean pooling and by fitting on calibration text. Both results are
    verified, their loss and their K/V cache are measured, and the better one is uptrained.

      gqa-convert demo

    Args:
        OUT: New folder for the results.
    """
    from gqa_convert.demo import run_demo

    from .console.progress import ProgressScreen
    from .console.screen import print_json

    with ProgressScreen(quiet=quiet) as screen:
        summary = run_demo(out, progress=screen.show)
    if as_json:
        print_json(summary)
    elif not quiet:
        _show(summary)
    if not summary["passed"]:
        raise typer.Exit(1)


def _show(summary: dict[str, Any]) -> None:
    from gqa_convert.checkpoint.byte_sizes import size
    from gqa_convert.measuring.evaluation.table import filled

    from .console.screen import stdout_console, tokens_text
    from .console.tables import show_table

    verified = {True: "yes", False: "NO", None: ""}
    results = summary["results"]
    rows = [
        {
            "": row["name"],
            "K/V heads": str(row["groups"]),
            "K/V cache per token": size(row["kv_bytes_per_token"]),
            "loss": f"{row['loss']:.3f}",
            "lost": f"{row['loss'] - results[0]['loss']:.3f}",
            "verified": verified[row["verified"]],
        }
        for row in results
    ]
    held_out, fitted = tokens_text(summary["held_out_tokens"]), tokens_text(summary["calibration_tokens"])
    used = f"fit used {fitted} tokens of calibration text, uptraining {tokens_text(summary['uptraining_tokens'])}"
    show_table(filled(rows), f"Loss in nats per token over {held_out} held-out tokens; {used}")
    console = stdout_console()
    console.print(f"results  {Path(results[1]['model']).parent}")
    console.print("next     gqa-convert convert YOUR-MODEL --groups 8 --dry-run")
