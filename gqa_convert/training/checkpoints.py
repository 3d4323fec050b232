"""Checkpoints of a run. Each is published atomically, the newest few are kept, and a run resumes from the newest.

A checkpoint is a folder `checkpoints/step-000123`. It holds the sharded state of model and optimizer, of which every
process writes its own part (torch.distributed.checkpoint), and `run.json`, which is written last and lists every file's
size.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from gqa_convert.checkpoint.atomic_files import sync
from gqa_convert.checkpoint.resource_errors import is_disk_full
from gqa_convert.checkpoint.strict_json import JsonObject
from gqa_convert.data.sources import DatasetCommits
from gqa_convert.errors import GQAConvertError, NoSpaceError, ResumeError
from gqa_convert.training.distributed import waiting_group

if TYPE_CHECKING:
    from torch.optim import Optimizer

_NAME = re.compile(r"step-(\d{6,})")
_UNFINISHED = ".unfinished-"
_RECORD = "run.json"

StateDict = dict[str, Any]
"""Tensors by name, nested as torch.distributed.checkpoint saves and loads them."""


@dataclass
class Progress:
    """The progress of a run; everything else follows from the recipe and the step."""

    step: int = 0
    """Optimizer steps taken or skipped."""
    tokens: int = 0
    skipped: int = 0
    """Steps without an update because a loss or a gradient was not finite."""
    skipped_in_a_row: int = 0
    evaluations: dict[str, float] = field(default_factory=dict)
    """Losses on the evaluation data: that of the `source`, and that at the `start`."""
    evaluated_on: str = ""
    """The fingerprint of the evaluation data."""
    changes: list[str] = field(default_factory=list)
    """Changes of the recipe during the run."""
    run_id: str = ""
    """What trackers know the run by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The content of `run.json` in a checkpoint.

    Attributes:
        progress: the progress of the run.
        recipe: the resolved recipe, which is compared when the run resumes.
        processes: the number of processes that wrote the checkpoint.
        samples: the fingerprint of the training data, which is compared too.
        files: the size of every file, by name.
        dataset_commits: the commits of Hub datasets, which the run keeps.
    """

    progress: Progress
    recipe: JsonObject
    processes: int
    samples: str
    files: dict[str, int]
    dataset_commits: DatasetCommits

    @classmethod
    def from_json(cls, content: JsonObject) -> Self:
        """The record in a file.

        Raises:
            KeyError, TypeError: a key is missing or unknown.
        """
        return cls(**content | {"progress": Progress(**content["progress"])})


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: `output/checkpoints`.
        kept: how many of the newest are kept, at least one.
        main: whether this is the process that publishes.
        together: a context for the work of one process, whose errors are raised on all processes.
    """

    def __init__(
        self,
        folder: Path,
        kept: int,
        *,
        main: bool,
        together: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.folder, self._kept, self._main, self._together = folder, kept, main, together

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        found = [(int(match[1]), path) for path in self.folder.iterdir() if (match := _NAME.fullmatch(path.name))]
        return sorted(step for step, path in found if (path / _RECORD).is_file())

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def newest(self, say: Callable[[str], None] = lambda _: None) -> RunRecord | None:
        """The record of the newest checkpoint whose files have the sizes that were recorded.

        Args:
            say: called with a message about each later checkpoint, which is damaged.

        Raises:
            ResumeError: there are checkpoints, and all of them are damaged.
        """
        problem = ""
        for step in reversed(self.steps()):
            try:
                record = self._record(step)
            except (OSError, ValueError, KeyError, TypeError) as raised:
                problem = problem or str(raised)
                say(f"{self.path(step)} is damaged ({raised}): resuming from the checkpoint before it")
                continue
            return record
        if problem:
            raise ResumeError(
                f"every checkpoint in {self.folder} is damaged ({problem}): remove the folder to start over"
            )
        return None

    def _record(self, step: int) -> RunRecord:
        """The record that `save` wrote beside the tensors, whose files are checked to exist with their sizes.

        Raises:
            OSError, ValueError, KeyError, TypeError: something is missing or cut short.
        """
        folder = self.path(step)
        record = RunRecord.from_json(json.loads((folder / _RECORD).read_text(encoding="utf-8")))
        for name, size in record.files.items():
            if (found := _size(folder / name)) != size:
                raise ValueError(f"{folder / name} has {found} bytes, expected {size}")
        return record

    def save(
        self,
        state: StateDict,
        progress: Progress,
        recipe: JsonObject,
        processes: int,
        samples: str,
        dataset_commits: DatasetCommits | None = None,
    ) -> None:
        """Write a checkpoint, publish it, and remove those that need not be kept. Every process calls this.

        While steps are being skipped nothing is removed, because an earlier checkpoint may be needed to recover.

        Args:
            state: whole or sharded tensors, in the form that torch.distributed.checkpoint accepts.
            progress: the progress of the run.
            recipe: the resolved recipe, which is compared when the run resumes.
            processes: the number of processes.
            samples: the fingerprint of the training data, which is compared too.
            dataset_commits: the commits of Hub datasets, which the run keeps.

        Raises:
            NoSpaceError: the disk is full; older checkpoints are intact.
        """
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.api import CheckpointException  # not a subclass of Exception

        final = self.path(progress.step)
        work = self.folder / f"{_UNFINISHED}{final.name}"
        with self._together():
            if self._main:
                try:
                    shutil.rmtree(work, ignore_errors=True)
                    work.mkdir(parents=True)
                except OSError as raised:
                    raise self._explained(raised) from None
        try:
            dcp.save(state, checkpoint_id=work, no_dist=processes == 1, process_group=waiting_group())
        except (Exception, CheckpointException) as raised:
            shutil.rmtree(work, ignore_errors=True)
            raise self._explained(raised) from None
        record = RunRecord(
            progress=progress,
            recipe=recipe,
            processes=processes,
            samples=samples,
            files={},
            dataset_commits=dataset_commits or {},
        )
        with self._together():
            if self._main:
                try:
                    self._publish(work, final, record)
                    if not progress.skipped_in_a_row:
                        self.prune(progress.step)
                except OSError as raised:
                    shutil.rmtree(work, ignore_errors=True)
                    raise self._explained(raised) from None

    def _publish(self, work: Path, final: Path, record: RunRecord) -> None:
        """Give a finished checkpoint its final name and its record."""
        files = {path.name: _size(path) for path in work.iterdir()}
        content = asdict(record) | {"files": files}
        (work / _RECORD).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        for path in work.iterdir():
            sync(path)
        sync(work)
        if final.exists():  # a damaged one
            self._remove(record.progress.step)
        work.rename(final)
        sync(self.folder)

    def load(self, step: int, state: StateDict, processes: int) -> None:
        """Fill `state` in place.

        Raises:
            ResumeError: the checkpoint is damaged.
        """
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.api import CheckpointException  # not a subclass of Exception

        try:
            dcp.load(state, checkpoint_id=self.path(step), no_dist=processes == 1, process_group=waiting_group())
        except (Exception, CheckpointException) as raised:
            problem = _inner(raised)
            first = next((line for line in str(problem).splitlines() if line.strip()), "")
            raise ResumeError(
                f"{self.path(step)} cannot be loaded ({type(problem).__name__}: {first[:200]}): remove it to resume from the checkpoint before it"
            ) from None

    def prune(self, newest: int) -> None:
        """Remove the checkpoints that need not be kept; one process calls this.

        Args:
            newest: the step of the newest one that is whole; later ones are damaged.
        """
        whole = [step for step in self.steps() if step <= newest]
        for step in whole[: -self._kept]:
            self._remove(step)

    def sweep(self) -> None:
        """Remove unfinished files of a killed run."""
        if self.folder.is_dir():
            for path in self.folder.glob(f"{_UNFINISHED}*"):
                shutil.rmtree(path, ignore_errors=True)

    def _remove(self, step: int) -> None:
        """Remove a checkpoint, after renaming it so that a partly removed one is never taken for a checkpoint."""
        doomed = self.folder / f"{_UNFINISHED}removed-{step:06d}"
        shutil.rmtree(doomed, ignore_errors=True)
        self.path(step).rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def _explained(self, problem: BaseException) -> BaseException:
        cause = _inner(problem)
        if isinstance(cause, GQAConvertError):  # a second Ctrl-C
            return cause
        if any(is_disk_full(each) for each in (cause, cause.__cause__, cause.__context__) if each is not None):
            return NoSpaceError(
                f"the disk of {self.folder} is full: make room and run the same command again; older checkpoints are intact"
            )
        return cause


def _inner(problem: BaseException) -> BaseException:
    """The error of the first process that failed."""
    failures = getattr(problem, "failures", None)
    return next(iter(failures.values()))[0] if failures else problem


def _size(path: Path) -> int:
    """The size of a file, which is opened first so that a network file system refreshes it."""
    with path.open("rb") as file:
        return file.seek(0, 2)


# The state of model and optimizer in a checkpoint, independent of how they are distributed over processes


def state_of(model: Any, optimizer: "Optimizer", *, trained_only: bool = False) -> StateDict:
    """Parameters and optimizer moments by name; if they are sharded, the part of this process.

    Args:
        model: the model or its wrapper for several processes.
        optimizer: of its trained parameters.
        trained_only: leave out the fixed parameters, which a model with adapters reads from its checkpoint.
    """
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    if not optimizer.state:  # all steps so far were skipped, or none has been taken
        get_optimizer_state_dict(
            model, optimizer
        )  # creates the moments by a step with zero gradients, which must not count
        for moments in optimizer.state.values():
            if "step" in moments:
                moments["step"].zero_()
    if trained_only:
        tensors = {name: each.detach() for name, each in _trained(model)}
    else:
        tensors = get_model_state_dict(model)
    return {"model": tensors, "optimizer": get_optimizer_state_dict(model, optimizer)}


def set_state(model: Any, optimizer: "Optimizer", state: StateDict, *, trained_only: bool = False) -> None:
    """Restore a state that `state_of` returned."""
    import torch
    from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

    if trained_only:
        with torch.no_grad():
            for name, parameter in _trained(model):
                parameter.copy_(state["model"][name])
    else:
        set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


def whole_model(model: Any) -> StateDict:
    """All parameters on the CPU, gathered from all processes onto the main one."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    tensors: StateDict = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return tensors


def _trained(model: Any) -> Iterator[tuple[str, Any]]:
    inner = model.module if hasattr(model, "module") else model
    return ((name, each) for name, each in inner.named_parameters() if each.requires_grad)
