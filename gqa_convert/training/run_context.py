"""What every stage of a run needs: its recipe, this process's part in it, and where messages go."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from gqa_convert.training import sharding
from gqa_convert.training.distributed import join, local_processes, together, wait
from gqa_convert.training.recipe import Recipe, check_lora
from gqa_convert.training.run_folder import RunFolder


@dataclass(frozen=True, slots=True)
class RunContext:
    """One run, on this process.

    Attributes:
        recipe: the recipe of the run.
        folder: the output folder.
        accelerator: accelerate's Accelerator of this process.
        layout: how the student lies on the processes.
        say: called with messages about events between the steps; does nothing except on the main process.
    """

    recipe: Recipe
    folder: RunFolder
    accelerator: Any
    layout: sharding.Layout
    say: Callable[[str], None]

    @property
    def main(self) -> bool:
        """Whether this is the main process."""
        return bool(self.accelerator.is_main_process)

    @property
    def adapters_only(self) -> bool:
        """Whether only the parameters of adapters are trained and saved."""
        return self.recipe.lora is not None

    def together(self) -> AbstractContextManager[None]:
        """A context for independent work of the processes, whose errors reach all of them."""
        return together(self.accelerator)

    def wait(self) -> None:
        """Wait until all processes have arrived."""
        wait(self.accelerator)


def join_run(recipe: Recipe, folder: RunFolder, on_message: Callable[[str], None]) -> RunContext:
    """Join the processes of a run.

    Args:
        recipe: the recipe of the run.
        folder: the output folder.
        on_message: called on the main process with messages about events between the steps.

    Raises:
        LaunchError: the launcher did not start the requested processes.
        RecipeError: the recipe does not suit the number of processes.
    """
    options: dict[str, Any] = {}
    if recipe.trackers:
        options = {"log_with": list(recipe.trackers), "project_dir": str(folder.trackers)}
    accelerator = join(**options)
    with together(accelerator):
        layout = sharding.layout_of(recipe.sharding, recipe.shard_size, accelerator.num_processes, local_processes())
        check_lora(recipe.lora, sharded=layout.sharded)
    say = on_message if accelerator.is_main_process else _say_nothing
    return RunContext(recipe, folder, accelerator, layout, say)


def _say_nothing(_: str) -> None:
    """What the other processes say."""
