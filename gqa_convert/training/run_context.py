"""What every stage of a run needs: its recipe, this process's part in it, and where messages go."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from gqa_convert.training.distributed import together, wait
from gqa_convert.training.recipe import Recipe
from gqa_convert.training.run_folder import RunFolder


@dataclass(frozen=True, slots=True)
class RunContext:
    """One run, on this process.

    Attributes:
        recipe: the recipe of the run.
        folder: the output folder.
        accelerator: accelerate's Accelerator of this process.
        sharded: whether the models are sharded over the processes.
        say: called with messages about events between the steps; does nothing except on the main process.
    """

    recipe: Recipe
    folder: RunFolder
    accelerator: Any
    sharded: bool
    say: Callable[[str], None]

    @property
    def main(self) -> bool:
        """Whether this is the main process."""
        return bool(self.accelerator.is_main_process)

    def together(self) -> AbstractContextManager[None]:
        """A context for independent work of the processes, whose errors reach all of them."""
        return together(self.accelerator)

    def wait(self) -> None:
        """Wait until all processes have arrived."""
        wait(self.accelerator)
