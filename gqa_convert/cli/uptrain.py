"""`gqa-convert uptrain`."""

import re
from functools import partial
from pathlib import Path
from typing import Any

from .options import Json, command_line, option, refuse


def _hardware(text: str) -> tuple[int, str]:
    """The number and the type of GPUs in 8xh100 or h100."""
    _, number, gpu = re.split(r"^(?:([1-9]\d{0,5}) ?x ?)?", text, maxsplit=1, flags=re.IGNORECASE)
    return int(number or 1), gpu


def uptrain(
    recipe: Path = option("RECIPE.yaml", "Recipe file: the model, the text and the budget.", ...),
    overrides: list[str] = option("KEY=VALUE", "Values that replace keys of the recipe.", []),
    dry_run: bool = option(
        "--dry-run", "Estimate memory and hours of the run; train nothing.", False
    ),
    hardware: Any = option(
        "--hardware NxGPU",
        "With --dry-run: the number and the type of GPUs, such as 8xh100. Default: one H100.",
        parser=_hardware,
    ),
    tokenize_only: bool = option(
        "--tokenize-only",
        "Tokenise the text ahead of the run, so that no GPU waits for it; train nothing.",
        False,
    ),
    as_json: Json = False,
) -> None:
    """Train a converted checkpoint to recover quality, with its source as teacher.

    RECIPE.yaml names at least a model, text and an output folder; the documentation's reference of
    uptraining lists all keys. The same command resumes an interrupted run. Exit code 75 means that
    a signal (TERM, USR1, INT, HUP) stopped the run after its state was saved.

    With --dry-run, the run is estimated on models without numbers: no weights are read. With
    --tokenize-only, the tokens go into the cache in which the run looks for them,
    $XDG_CACHE_HOME/gqa-convert or ~/.cache/gqa-convert; the same command continues after it was
    stopped.

      gqa-convert uptrain recipe.yaml tokens=500M learning_rate=1e-4
      gqa-convert uptrain recipe.yaml --dry-run --hardware 8xh100
      accelerate launch --config_file recipes/accelerate/multi_gpu.yaml \\
        -m gqa_convert uptrain recipe.yaml
    """
    if not dry_run:
        refuse({"--hardware": hardware}, "describes GPUs for the estimate of --dry-run")
    elif tokenize_only:
        refuse({"--tokenize-only": True}, "writes tokens, and --dry-run writes nothing")
    from .console.screen import ProgressScreen, print_json
    from .console.training import show_estimate, show_step, show_tokenized, show_training

    with ProgressScreen() as screen:
        if dry_run:
            from gqa_convert.training.estimate import estimate

            result: Any = estimate(recipe, overrides, *(hardware or (1, "h100")))
            show: Any = show_estimate
        elif tokenize_only:
            from gqa_convert.training.opening import tokenize_recipe

            result = tokenize_recipe(recipe, overrides, on_tokenize=screen.show)
            show = show_tokenized
        else:
            from gqa_convert.training.uptrain import uptrain_checkpoint

            result = uptrain_checkpoint(
                recipe,
                overrides,
                on_message=screen.say,
                on_step=partial(show_step, screen),
                on_tokenize=screen.show,
                command=command_line(),
            )
            show = show_training
    if result is None:  # only the main process has the summary
        return
    if as_json:
        print_json(result.as_json())
    else:
        show(result)
