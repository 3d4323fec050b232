"""Checkpoints of a run. Each is published atomically, the newest few are kept, and a run resumes
from the newest whole one.

A checkpoint is a folder `checkpoints/step-000123`. It holds the sharded state of model and
optimizer, of which every process writes its own part (torch.distributed.checkpoint), and
`run.json`, which is written last and lists every file's size.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from shutil import rmtree
from typing import Any
from uuid import uuid4

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import Optimizer

from gqa_convert.errors import GQAConvertError, ResumeError, first_line, is_disk_full, no_space
from gqa_convert.processes import Say, by_first, rank, waiting_group
from gqa_convert.publishing.atomic_files import sync, write_json
from gqa_convert.runtime.json_objects import JsonObject
from gqa_convert.sharding import unwrapped

_NAME = "step-"
"""Of a checkpoint's folder, before the number of its step."""
_UNFINISHED = ".unfinished-"
_RECORD = "run.json"
_DAMAGE = (OSError, ValueError, KeyError, TypeError)
"""What reading a checkpoint raises from which something is missing or cut short."""

StateDict = dict[str, Any]
"""Tensors by name, nested as torch.distributed.checkpoint saves and loads them."""


@dataclass
class Progress:
    """The progress of a run, which `run.json` holds beside the size of every file; everything else
    follows from the recipe and the step.

    Attributes:
        step: optimizer steps taken or skipped.
        tokens: of text.
        skipped: steps without an update because a loss or a gradient was not finite.
        skipped_in_a_row: the last ones.
        evaluations: losses on the evaluation data: that at the `start`, that of the `source`, and
            the `last` one.
        warmup_steps: of the run, whose budget may grow.
        highest_share: the share of the peak that the learning rate had reached when the budget
            grew.
        changes: changes of the recipe during the run.
        recipe: the resolved recipe, which is compared when the run resumes.
        inputs: fingerprints of the texts and of the models, which are compared too.
        tracked_as: what a tracker that can go on with a run knows it by.
    """

    step: int = 0
    tokens: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    evaluations: dict[str, float] = field(default_factory=dict)
    warmup_steps: int = 0
    highest_share: float = 1.0
    changes: list[str] = field(default_factory=list)
    recipe: JsonObject = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)
    tracked_as: str = field(default_factory=lambda: uuid4().hex)


@dataclass
class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: `output/checkpoints`.
        kept: how many of the newest are kept, at least one.
    """

    folder: Path
    kept: int

    def path(self, step: int) -> Path:
        return self.folder / f"{_NAME}{step:06d}"

    def _all(self) -> list[Path]:
        """The checkpoints, newest first."""
        return sorted(self.folder.glob(f"{_NAME}*"), key=_step, reverse=True)

    def whole(self, say: Say = lambda _: None) -> list[Progress]:
        """The records of the checkpoints that have one and all files in the sizes that it states,
        newest first.

        Args:
            say: called with a message about each other checkpoint.
        """
        records = []
        for path in self._all():
            try:
                records.append(_read(path))
            except _DAMAGE as problem:
                say(f"{path} is damaged ({problem}) and is passed over")
        return records

    def newest(self, say: Say) -> Progress | None:
        """The record of the newest checkpoint that is whole; None if there is no checkpoint.

        Args:
            say: called with a message about each checkpoint that is damaged.

        Raises:
            ResumeError: there are checkpoints, and all of them are damaged.
        """
        records = self.whole(say)
        if not records and self._all():
            raise ResumeError(
                f"every checkpoint in {self.folder} is damaged: remove the folder to start over"
            )
        return next(iter(records), None)

    def check_seen(self, record: Progress) -> None:
        """Check that this process sees the checkpoint of a record that the first process has read.

        Raises:
            ResumeError: it does not.
        """
        path = self.path(record.step)
        with suppress(*_DAMAGE):
            if not record.step or _read(path) == record:
                return
        raise ResumeError(
            f"the first process resumes from {path}, which process {rank()} does not see as it is "
            "there: put output on a file system that all machines share"
        )

    def save(self, state: StateDict, record: Progress) -> None:
        """Write a checkpoint, publish it, and remove those that need not be kept. Every process
        calls this.

        While steps are being skipped nothing is removed, because an earlier checkpoint may be
        needed to recover.

        Args:
            state: whole or sharded tensors, in the form that torch.distributed.checkpoint accepts.
            record: what is needed to resume.

        Raises:
            NoSpaceError: the disk is full; older checkpoints are intact.
        """
        work = self.folder / f"{_UNFINISHED}{record.step}"
        try:
            # dcp.async_save holds a second copy of the state (0.63 GB more for 0.64 GB) and blocks
            # a CPU as long, 2.0 s for 2.2; an error of one process is raised on all
            with _first_failure():
                dcp.save(state, checkpoint_id=work, process_group=waiting_group())
            by_first(lambda: self._publish(work, record))
        except BaseException as problem:
            rmtree(work, ignore_errors=True)
            if is_disk_full(problem) or is_disk_full(problem.__cause__ or problem):
                raise no_space(self.folder, "resumes from the last checkpoint") from None
            raise

    def _publish(self, work: Path, record: Progress) -> None:
        """Complete a written checkpoint and give it its name."""
        files = {path.name: _size(path) for path in work.iterdir()}
        write_json(work / _RECORD, asdict(record) | {"files": files})
        for path in (*work.iterdir(), work):
            sync(path)
        final = self.path(record.step)
        rmtree(final, ignore_errors=True)  # a damaged one
        work.rename(final)
        sync(self.folder)
        if not record.skipped_in_a_row:
            self.prune()

    def load(self, step: int, state: StateDict) -> None:
        """Fill `state` in place.

        Raises:
            ResumeError: the checkpoint is damaged.
        """
        path = self.path(step)
        try:
            with _first_failure():
                dcp.load(state, checkpoint_id=path, process_group=waiting_group())
        except GQAConvertError:  # a signal's
            raise
        except Exception as problem:
            raise ResumeError(
                f"{path} cannot be loaded ({first_line(problem)}): remove it to resume from the "
                "checkpoint before it"
            ) from None

    def prune(self) -> None:
        """Remove the checkpoints before the newest whole ones that are kept; one process calls
        this.
        """
        kept = self.whole()[: self.kept]
        oldest = min((record.step for record in kept), default=0)
        for path in self._all():
            if _step(path) < oldest:
                rmtree(path, ignore_errors=True)  # what is left of one is not whole

    def sweep(self) -> None:
        """Remove unfinished files of a killed run."""
        for path in self.folder.glob(f"{_UNFINISHED}*"):
            rmtree(path, ignore_errors=True)


def _step(path: Path) -> int:
    return int(path.name.removeprefix(_NAME))


def _read(path: Path) -> Progress:
    """The record of a checkpoint, whose files are checked to exist with their sizes.

    Raises:
        OSError, ValueError, KeyError, TypeError: something is missing or cut short.
    """
    content = json.loads((path / _RECORD).read_bytes())
    for name, size in content.pop("files").items():
        if (found := _size(path / name)) != size:
            raise ValueError(f"{path / name} has {found} bytes, expected {size}")
    return Progress(**content)


@contextmanager
def _first_failure() -> Iterator[None]:
    """Raise the error of the first process that failed in place of torch's summary, which is no
    Exception.
    """
    try:
        yield
    except CheckpointException as raised:
        error, _ = next(iter(raised.failures.values()))
        raise error from error.__cause__ or error.__context__


def _size(path: Path) -> int:
    """The size of a file, which is opened first so that a network file system refreshes it."""
    with path.open("rb") as file:
        return file.seek(0, 2)


def state_of(model: Any, optimizer: Optimizer) -> StateDict:
    """Trained parameters and their moments by name, which loading fills in place; if they are
    sharded, the part of this process. Everything else a run reads from the checkpoint that it
    trains.

    Args:
        model: the model or its wrapper for several processes.
        optimizer: of its trained parameters.
    """
    is_new = not optimizer.state  # all steps so far were skipped, or none has been taken
    moments = get_optimizer_state_dict(model, optimizer)
    if is_new:
        # torch has made the moments by a step with zero gradients, which must not count
        for kept in optimizer.state.values():
            if "step" in kept:
                kept["step"].zero_()
    named = unwrapped(model).named_parameters()
    trained = {name: parameter.detach() for name, parameter in named if parameter.requires_grad}
    return {"model": trained, "optimizer": moments}
