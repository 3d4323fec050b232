"""`gqa-convert report`."""

from pathlib import Path
from typing import Annotated

import typer

from .options import Json, Quiet


def report(
    run_dirs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN_DIR...", help="Folders, or JSON files, to report on.", show_default=False),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FOLDER",
            help="Default: report in the first RUN_DIR, or beside a checkpoint.",
            show_default=False,
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Rename files of the same names that no report has made.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Draw tables and plots from what convert, uptrain, evaluate and benchmark wrote: quality against time, recovery,
    time and bytes, errors.

    Each RUN_DIR is searched four levels deep: converted checkpoints, uptraining runs, and JSON files that evaluate,
    benchmark, inspect or demo made. Models and times are joined by N. One report.html, which needs no network, and
    report.md with its figures as SVG files.

      gqa-convert evaluate  ./Llama-2-7b ./runs/gqa8 --data text.txt --json > runs/evaluate.json

      gqa-convert benchmark ./Llama-2-7b --groups 1,8,32 --json > runs/benchmark.json

      gqa-convert report    ./runs

      gqa-convert report    ./gqa-demo --out ./my-report
    """
    from gqa_convert.cli.console.report import show_report
    from gqa_convert.cli.console.screen import print_json
    from gqa_convert.publishing.report.run import make_report

    made = make_report(run_dirs, out, overwrite=overwrite)
    if as_json:
        print_json(made)
    elif not quiet:
        show_report(made)
