"""Saves checkpoints, before the next step or behind it.

In the background, a save first copies the state of this process into the machine's memory; a thread writes the copy
while the next steps are computed. One save at a time is under way, so that the next one waits for it. A checkpoint that
is being written has no final name, and a run that is killed meanwhile resumes from the one before it.
"""

import copy
import threading
from collections.abc import Callable
from typing import Any

from gqa_convert.training.checkpoints import Checkpoints, Progress
from gqa_convert.training.state import StateDict


class Saver:
    """Saves the checkpoints of one run. All processes call its methods in the same order.

    Args:
        checkpoints: writes and publishes a checkpoint. In the background, its collectives run in a thread, and need a
            process group that nothing else uses.
        background: whether steps continue while a checkpoint is written.
        on_saved: called on every process with the progress that a published checkpoint holds.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        *,
        background: bool,
        on_saved: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        self._checkpoints, self._background, self._on_saved = checkpoints, background, on_saved
        self._thread: threading.Thread | None = None
        self._problem: BaseException | None = None

    def save(self, state: StateDict, progress: Progress, **record: Any) -> None:
        """Save a state, which may change as soon as this returns.

        Args:
            state: of model and optimizer.
            progress: of the run.
            record: further arguments of `Checkpoints.save`.

        Raises:
            NoSpaceError: the disk was full, now or during the previous save.
        """
        self.finish()
        if not self._background:
            self._checkpoints.save(state, progress, **record)
            self._on_saved(progress)
            return
        from torch.distributed.checkpoint.staging import BlockingAsyncStager

        staged, then = BlockingAsyncStager().stage(state), copy.deepcopy(progress)
        self._thread = threading.Thread(target=self._write, args=(staged, then, record), name="saving", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until the save that is under way has ended.

        Raises:
            Exception: the error that ended it.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._problem is not None:
            problem, self._problem = self._problem, None
            raise problem

    def _write(self, state: StateDict, progress: Progress, record: dict[str, Any]) -> None:
        try:
            self._checkpoints.save(state, progress, **record)
            self._on_saved(progress)
        except BaseException as raised:  # raised by the next `finish`
            self._problem = raised
