"""`gqa-convert demo`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from .options import Json, Quiet


def demo(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New folder for the results.")] = Path("gqa-demo"),
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Try the whole workflow on a small bundled model, offline, in a few minutes on two cores.

    A quarter of the model's K/V heads are kept, by mean pooling and by fitting on calibration text. Both results are
    verified, their loss and their K/V cache are measured, and the better one is uptrained.

      gqa-convert demo
    """
    from gqa_convert.demo import run_demo

    from .console.progress import stage_progress
    from .console.screen import print_json

    with stage_progress(quiet=quiet) as progress:
        summary = run_demo(out, progress=progress)
    if as_json:
        print_json(summary)
    elif not quiet:
        _show(summary)
    if not summary["passed"]:
        raise typer.Exit(1)


def _show(summary: dict[str, Any]) -> None:
    from .console.screen import stdout_console, tokens_text
    from .console.tables import Column, show_table

    texts = {name: tokens_text(summary[f"{name}_tokens"]) for name in ("held_out", "calibration", "uptraining")}
    headings = ("K/V heads", "K/V cache per token", "loss", "lost", "verified")
    rows = []
    source = summary["results"][0]
    for row in summary["results"]:
        lost = "" if row is source else f"{row['loss'] - source['loss']:+.3f}"
        verified = {True: "yes", False: "NO", None: ""}[row["verified"]]
        cache = f"{row['kv_bytes_per_token']:,} bytes"
        rows.append([row["name"], str(row["groups"]), cache, f"{row['loss']:.3f}", lost, verified])
    show_table(
        ["", *(Column(heading, "right") for heading in headings)],
        rows,
        title=f"Loss in nats per token over {texts['held_out']} held-out tokens; fit used {texts['calibration']} tokens of calibration text, uptraining {texts['uptraining']}",
    )
    console = stdout_console()
    folder = Path(summary["results"][1]["model"]).parent
    console.print(f"results  {folder}", soft_wrap=True)
    console.print("next     gqa-convert convert YOUR-MODEL --groups 8 --dry-run", soft_wrap=True)
