"""Uptraining, as callers see it: a recipe in, a summary or an error of one line out. `run` sets up
and finishes a run, `trainer` takes the steps.
"""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gqa_convert.errors import (
    GQAConvertError,
    OutputError,
    is_disk_full,
    is_out_of_memory,
    no_space,
)
from gqa_convert.families.loading import quiet
from gqa_convert.processes import Say, out_of_memory, taking_part

from .recipe import read_recipe
from .stopping import StopRequests

if TYPE_CHECKING:  # these import numpy and torch
    from gqa_convert.data.token_files import OnTokenize

    from .metrics import OnStep, RunSummary


@dataclass
class Caller:
    """What a run tells its caller, and how it was called; see `uptrain_checkpoint`."""

    on_message: Say
    on_step: "OnStep"
    on_tokenize: "OnTokenize"
    command: list[str] | None


def uptrain_checkpoint(
    path: str | Path,
    overrides: list[str],
    *,
    on_message: Say = lambda _: None,
    on_step: "OnStep" = lambda *_: None,
    on_tokenize: "OnTokenize" = lambda *_: None,
    command: list[str] | None = None,
) -> "RunSummary | None":
    """Uptrain a converted checkpoint by a recipe; a run with checkpoints is resumed.

    Args:
        path: the path of the recipe.
        overrides: `key=value` pairs that replace values of the recipe.
        on_message: called with messages about events between the steps.
        on_step: called on the main process with the metrics of every step that is logged, and the
            number of steps in the run.
        on_tokenize: called with a source of text, the bytes tokenised and their total.
        command: the command line, for the records.

    Returns:
        The summary that `output/summary.json` holds, on the main process; None on the others.

    Raises:
        RecipeError: the recipe is wrong.
        SourceNotFoundError: a model of the recipe does not exist.
        LaunchError: the launcher did not start the requested processes.
        ResumeError: the output holds a run that this recipe can't resume.
        OutputError: the output can't be written, or holds files that no run wrote.
        NoSpaceError: its disk is full.
        DataError: the text can't be used.
        DivergedError: training produced numbers that are not finite.
        DeviceMemoryError: a step needs more memory than there is.
        StoppedError: a signal asked to stop, and the state is saved.
    """
    recipe = read_recipe(path, overrides)
    output = Path(recipe.output)
    caller = Caller(on_message, on_step, on_tokenize, command)
    try:
        with StopRequests() as stops, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of torch and transformers for developers
            from .run import uptrain

            with taking_part(), quiet():
                return uptrain(recipe, stops, caller)
    except GQAConvertError:
        raise
    except Exception as problem:  # safetensors reports a full disk without OSError
        if is_disk_full(problem):
            raise no_space(output, "resumes from the last checkpoint") from None
        if is_out_of_memory(problem):
            raise out_of_memory() from None
        file = getattr(problem, "filename", None)
        if file and Path(str(file)).absolute().is_relative_to(output.absolute()):
            raise OutputError(
                f"{output} can't be used ({problem}): name a writable folder"
            ) from None
        raise
