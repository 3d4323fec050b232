"""`gqa-convert uptrain`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from .options import Json, Quiet


def uptrain(
    recipe: Annotated[
        Path,
        typer.Argument(
            metavar="RECIPE.yaml", help="Recipe file: the model, the text and the budget.", show_default=False
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Values that replace keys of the recipe.", show_default=False),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a converted checkpoint to recover quality, with its source as teacher if the recipe names one.

    RECIPE.yaml names at least a model, text and an output folder; docs/uptraining.md lists all keys with their
    defaults. The same command resumes an interrupted run. Exit code 75 means that a signal (TERM, USR1, INT, HUP)
    stopped the run after its state was saved.

    Examples:

      gqa-convert uptrain recipes/tiny.yaml
      gqa-convert uptrain recipe.yaml tokens=500M learning_rate=1e-4
      accelerate launch --config_file recipes/accelerate/multi_gpu.yaml -m gqa_convert uptrain recipe.yaml
      ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 -m gqa_convert uptrain recipe.yaml
    """
    from gqa_convert.cli.console.progress import training_progress
    from gqa_convert.cli.console.screen import print_json
    from gqa_convert.cli.console.training import show_training
    from gqa_convert.training.uptrain import uptrain_checkpoint as run

    with training_progress(quiet=quiet) as screen:
        summary = run(
            recipe,
            overrides or [],
            on_message=screen.say,
            on_step=screen.step,
            on_tokenize=screen.tokenize,
            command=["gqa-convert", *sys.argv[1:]],
        )
    if summary is None:  # only the main process has the summary
        return
    if as_json:
        print_json(summary.as_json())
    elif not quiet:
        show_training(summary)
