"""Determines what a run's output folder holds: nothing, a complete run, or a checkpoint to resume from."""

import copy
from collections.abc import Callable

from gqa_convert.errors import ResumeError
from gqa_convert.training.checkpoints import Checkpoints, Progress, RunRecord
from gqa_convert.training.recipe import AGAINST_DIVERGENCE, BOOKKEEPING, EXECUTION, Recipe, make_recipe
from gqa_convert.training.run_folder import RunFolder
from gqa_convert.training.summary import RunSummary


def look_back(
    recipe: Recipe, folder: RunFolder, checkpoints: Checkpoints
) -> tuple[RunSummary | None, RunRecord | None]:
    """The summary of a complete run, and the record of the checkpoint to resume from.

    Raises:
        ResumeError: the output folder holds a run that this recipe can't resume.
    """
    finished, newest = folder.finished(), checkpoints.newest()
    if finished is None and newest is None:
        return None, None
    earlier = make_recipe(newest.recipe) if newest else folder.read_recipe()
    commits = newest.dataset_commits if newest else folder.read_commits()
    may_change = (*BOOKKEEPING, *EXECUTION, *(AGAINST_DIVERGENCE if folder.diverged.exists() else ()))
    different = earlier.pinned(commits).differences(recipe.pinned(commits), may_change=may_change)
    if different:
        raise ResumeError(
            f"{recipe.output} holds a run with another recipe: {'; '.join(different)}; restore these keys to resume it, or name another output"
        )
    if finished is not None and earlier.budget_tokens == recipe.budget_tokens:
        return finished, None
    if newest is None:
        raise ResumeError(
            f"{recipe.output} holds a complete run without checkpoints, which can't be resumed: name another output"
        )
    return None, newest


def take_up(
    record: RunRecord, recipe: Recipe, folder: RunFolder, processes: int, say: Callable[[str], None]
) -> Progress:
    """The progress that a run resumes with. Differences from the run that saved the checkpoint are reported.

    Args:
        record: the record of the checkpoint.
        recipe: the current recipe.
        folder: the folder of the run.
        processes: the current number of processes.
        say: called with every difference.
    """
    progress = copy.deepcopy(record.progress)
    if record.processes != processes:
        say(f"the checkpoint was saved by {record.processes} process(es): sums are rounded differently from now on")
    before, now = make_recipe(record.recipe).pinned(record.dataset_commits), recipe.pinned(record.dataset_commits)
    for change in before.differences(now, may_grow=(), may_change=(*BOOKKEEPING, *EXECUTION)):
        progress.changes.append(f"from step {progress.step + 1}: {change}")
        say(change)
    if folder.diverged.exists():
        progress.skipped_in_a_row = 0
    return progress
