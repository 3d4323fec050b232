"""`gqa-convert uptrain`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gqa_convert.errors import OptionError

from .options import Json, Quiet, byte_count

if TYPE_CHECKING:
    from gqa_convert.training.dry_run import DryRun


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
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Estimate memory, arithmetic, communication, time and text of the run; train nothing."
        ),
    ] = False,
    gpus: Annotated[
        int | None,
        typer.Option(
            "--gpus",
            metavar="N",
            min=1,
            max=100_000,
            help="With --dry-run: the number of GPUs. The default is that of the launcher, or 1.",
            show_default=False,
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu", metavar="NAME", help="With --dry-run: the type of the GPUs, such as h100.", show_default=False
        ),
    ] = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option(
            "--gpu-memory",
            metavar="SIZE",
            help="With --dry-run: the memory of a GPU, such as 80GiB. The default is that of its type.",
            show_default=False,
        ),
    ] = None,
    utilisation: Annotated[
        float | None,
        typer.Option(
            "--utilisation",
            metavar="SHARE",
            min=0.001,
            max=1,
            help="With --dry-run: the share of the peak arithmetic that a step reaches. The default is 0.35.",
            show_default=False,
        ),
    ] = None,
    price: Annotated[
        float | None,
        typer.Option(
            "--price",
            metavar="AMOUNT",
            min=0,
            help="With --dry-run: the price of one GPU for one hour.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a converted checkpoint to recover quality, with its source as teacher if the recipe names one.

    RECIPE.yaml names at least a model, text and an output folder; docs/uptraining.md lists all keys with their
    defaults. The same command resumes an interrupted run. Exit code 75 means that a signal (TERM, USR1, INT, HUP)
    stopped the run after its state was saved.

    With --dry-run, nothing is trained, tokenised or written: the command estimates the run on the GPUs that the options
    describe, from the recipe, the configs and the headers of the weight files.

    Examples:

      gqa-convert uptrain recipes/tiny.yaml
      gqa-convert uptrain recipe.yaml tokens=500M learning_rate=1e-4
      gqa-convert uptrain recipe.yaml --dry-run --gpus 8 --gpu h100 --price 2.5
      accelerate launch --config_file recipes/accelerate/multi_gpu.yaml -m gqa_convert uptrain recipe.yaml
      ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 -m gqa_convert uptrain recipe.yaml
    """
    from gqa_convert.cli.console.screen import print_json

    if dry_run:
        found = _estimate(recipe, overrides or [], gpus, gpu, gpu_memory, utilisation, price)
        if as_json:
            print_json(found.as_json())
        elif not quiet:
            from gqa_convert.cli.console.dry_run import show_dry_run

            show_dry_run(found)
        return
    _refuse_hardware(gpus=gpus, gpu=gpu, gpu_memory=gpu_memory, utilisation=utilisation, price=price)
    from gqa_convert.cli.console.progress import progress_screen
    from gqa_convert.cli.console.training import TrainingScreen, show_training
    from gqa_convert.training.uptrain import uptrain_checkpoint as run

    with progress_screen(quiet=quiet) as progress:
        screen = TrainingScreen(progress)
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


def _estimate(
    recipe: Path,
    overrides: list[str],
    gpus: int | None,
    gpu: str | None,
    gpu_memory: str | None,
    utilisation: float | None,
    price: float | None,
) -> "DryRun":
    from gqa_convert.training.dry_run import UTILISATION, Hardware, launched_gpus
    from gqa_convert.training.dry_run import dry_run as estimate
    from gqa_convert.training.gpus import named_gpu

    hardware = Hardware(
        gpus=gpus or launched_gpus(),
        gpu=None if gpu is None else named_gpu(gpu),
        memory=byte_count(gpu_memory, "--gpu-memory"),
        utilisation=UTILISATION if utilisation is None else utilisation,
        price=price,
    )
    return estimate(recipe, overrides, hardware)


def _refuse_hardware(**options: object) -> None:
    """Refuse options that have a meaning with --dry-run only.

    Raises:
        OptionError: one of them is given.
    """
    for name, value in options.items():
        if value is not None:
            option = f"--{name.replace('_', '-')}"
            raise OptionError(f"{option} describes GPUs to estimate for: add --dry-run, or remove {option}")
