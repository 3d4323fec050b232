"""`gqa-convert report`."""

from pathlib import Path
from typing import Annotated

import typer

from .options import Json, Quiet


def report(
    run_dirs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN_DIR...", help="Folders or JSON files with results.", show_default=False),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FOLDER",
            help="Folder for the report. Default: report in the first RUN_DIR, or beside it if it is a checkpoint.",
            show_default=False,
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Rename existing files with the same names that report did not write.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Combine the results of convert, uptrain, evaluate and benchmark in one page of tables and plots.

    Every RUN_DIR is searched four levels deep for converted checkpoints, uptraining runs, and JSON files of evaluate,
    benchmark, inspect and demo. Losses and times are joined by the number of K/V heads. The result is report.html,
    which needs no network, and report.md with its figures as SVG files.

    Examples:

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
        print_json(made.as_json())
    elif not quiet:
        show_report(made)
