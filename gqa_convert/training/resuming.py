"""What a run finds in its output: nothing, a run that is complete, or a checkpoint to go on from."""

from collections.abc import Callable
from typing import Any

from gqa_convert.errors import ResumeError
from gqa_convert.training.checkpoints import Checkpoints, Progress
from gqa_convert.training.recipe import AGAINST_DIVERGENCE, BOOKKEEPING, EXECUTION, Recipe, make_recipe
from gqa_convert.training.run_folder import RunFolder


def look_back(
    recipe: Recipe, folder: RunFolder, checkpoints: Checkpoints
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The summary of a run that is complete, and the record of the checkpoint to go on from.

    Raises:
        ResumeError: the output holds a run that this recipe can't go on from.
    """
    finished, newest = folder.finished(), checkpoints.newest()
    if finished is None and newest is None:
        return None, None
    earlier = make_recipe(newest[1]["recipe"]) if newest else folder.read_recipe()
    may_change = (*BOOKKEEPING, *EXECUTION, *(AGAINST_DIVERGENCE if folder.diverged.exists() else ()))
    different = earlier.differences(recipe, may_change=may_change)
    if different:
        raise ResumeError(
            f"{recipe.output} holds a run with another recipe: {'; '.join(different)}; restore these keys to go on, or name another output"
        )
    if finished is not None and earlier.budget_tokens == recipe.budget_tokens:
        return finished, None
    if newest is None:
        raise ResumeError(
            f"{recipe.output} is complete and its checkpoints are gone, so that it can't go on: name another output"
        )
    return None, newest[1]


def take_up(
    record: dict[str, Any], recipe: Recipe, folder: RunFolder, processes: int, say: Callable[[str], None]
) -> Progress:
    """Where a run goes on, once it is said what is not as it was when the checkpoint was saved.

    Args:
        record: of the checkpoint.
        recipe: as it is now.
        folder: the run's.
        processes: how many there are now.
        say: called with every difference.
    """
    progress = Progress(**record["progress"])
    if record["processes"] != processes:
        say(f"it was saved by {record['processes']} process(es): sums will be rounded otherwise from here on")
    for change in make_recipe(record["recipe"]).differences(recipe, may_grow=(), may_change=(*BOOKKEEPING, *EXECUTION)):
        progress.changes.append(f"from step {progress.step + 1}: {change}")
        say(change)
    if folder.diverged.exists():
        progress.skipped_in_a_row = 0
    return progress
