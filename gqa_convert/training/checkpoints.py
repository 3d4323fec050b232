"""Checkpoints of a run. Each is published atomically, the newest few are kept, and a run resumes from the newest.

A checkpoint is a folder `checkpoints/step-000123`. It holds the sharded state of model and optimizer, of which every
process writes its own part (torch.distributed.checkpoint), and `run.json`, which is written last and lists every file's
size and SHA-256.
"""

import json
import re
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from gqa_convert.checkpoint.atomic_files import sync
from gqa_convert.checkpoint.resource_errors import is_disk_full
from gqa_convert.checkpoint.strict_json import JsonObject
from gqa_convert.errors import GQAConvertError, NoSpaceError, ResumeError
from gqa_convert.text.dataset_commits import DatasetCommits
from gqa_convert.training.digests import digests, first_difference, share
from gqa_convert.training.distributed import waiting_group
from gqa_convert.training.state import StateDict

_NAME = re.compile(r"step-(\d{6,})")
_UNFINISHED = ".unfinished-"
_RECORD = "run.json"
_FORMAT = 1


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The content of `run.json` in a checkpoint.

    Attributes:
        progress: the progress of the run.
        recipe: the resolved recipe, which is compared when the run resumes.
        processes: the number of processes that wrote the checkpoint.
        samples: the fingerprint of the training data, which is compared too.
        sha256: the digest of every file, by name.
        files: the size of every file, by name.
        dataset_commits: the commits of Hub datasets, which the run keeps.
    """

    progress: Progress
    recipe: JsonObject
    processes: int
    samples: str
    sha256: dict[str, str]
    files: dict[str, int]
    dataset_commits: DatasetCommits

    def as_json(self) -> JsonObject:
        """The record as plain data."""
        return {"format": _FORMAT} | asdict(self)

    @classmethod
    def from_json(cls, content: JsonObject) -> Self:
        """The record in a file.

        Raises:
            KeyError, TypeError: a key is missing or unknown.
        """
        return cls(
            progress=Progress(**content["progress"]),
            recipe=content["recipe"],
            processes=content["processes"],
            samples=content["samples"],
            sha256=content["sha256"],
            files=content["files"],
            dataset_commits=content["dataset_commits"],
        )


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: `output/checkpoints`.
        kept: how many of the newest are kept, at least one.
        main: whether this is the process that publishes.
        together: a context for the work of one process, whose errors are raised on all processes.
        process: the number of this process.
        gather: gathers a value from every process, in the order of their numbers.
        group: returns the process group of torch.distributed.checkpoint.
    """

    def __init__(
        self,
        folder: Path,
        kept: int,
        *,
        main: bool,
        together: Callable[[], AbstractContextManager[None]] = nullcontext,
        process: int = 0,
        gather: Callable[[Any], list[Any]] = lambda value: [value],
        group: Callable[[], Any] = waiting_group,
    ) -> None:
        self.folder = folder
        self._kept = kept
        self._group = group
        self._main = main
        self._together = together
        self._process = process
        self._gather = gather
        self._problems: dict[int, str] = {}
        """The problems of checkpoints that were found to be damaged, by step."""

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        found = [(int(match[1]), path) for path in self.folder.iterdir() if (match := _NAME.fullmatch(path.name))]
        return sorted(step for step, path in found if (path / _RECORD).is_file())

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def newest(self) -> RunRecord | None:
        """The record of the newest intact checkpoint; those after it are damaged.

        Raises:
            ResumeError: there are checkpoints, and all of them are damaged.
        """
        steps = self.steps()
        for step in reversed(steps):
            if step in self._problems:
                continue
            try:
                return self._record(step)
            except (OSError, ValueError, KeyError, TypeError) as raised:
                self._problems[step] = str(raised)
        if steps:
            problem = self._problems[steps[-1]]
            raise ResumeError(
                f"every checkpoint in {self.folder} is damaged ({problem}): remove the folder to start over"
            )
        return None

    def is_intact(self, record: RunRecord, processes: int) -> bool:
        """Whether the files of a checkpoint hold what was written. Every process calls this and reads its share of the
        files.

        Args:
            record: the record of the checkpoint. If the checkpoint is damaged, `newest` skips it from now on.
            processes: the number of processes.
        """
        recorded, step = record.sha256, record.progress.step
        mine = share(recorded, self._process, processes)
        found = self._gather(first_difference(self.path(step), {name: recorded[name] for name in mine}))
        problem = next(filter(None, found), "")
        if problem:
            self._problems[step] = problem
        return not problem

    def _record(self, step: int) -> RunRecord:
        """The record that `save` wrote beside the tensors, whose files are checked to exist with their sizes.

        Raises:
            OSError, ValueError, KeyError, TypeError: something is missing or cut short.
        """
        folder = self.path(step)
        content: JsonObject = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise ValueError(f"{folder} is in format {content['format']}, this program reads format {_FORMAT}")
        record = RunRecord.from_json(content)
        for name, size in record.files.items():
            if (found := _size(folder / name)) != size:
                raise ValueError(f"{folder / name} has {found} bytes, expected {size}")
        return record

    def set_aside_after(self, step: int) -> list[tuple[Path, str]]:
        """Rename the damaged checkpoints after a step; returns their new names and their problems."""
        aside = []
        for later in self.steps():
            if later > step:
                new = self.folder / f"damaged-step-{later:06d}"
                shutil.rmtree(new, ignore_errors=True)
                self.path(later).rename(new)
                aside.append((new, self._problems.get(later, "it is not complete")))
        return aside

    def save(
        self,
        state: StateDict,
        progress: Progress,
        recipe: JsonObject,
        processes: int,
        samples: str,
        dataset_commits: DatasetCommits | None = None,
    ) -> Path:
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
            dcp.save(state, checkpoint_id=work, no_dist=processes == 1, process_group=self._group())
        except (Exception, CheckpointException) as raised:
            shutil.rmtree(work, ignore_errors=True)
            raise self._explained(raised) from None
        with self._together():
            try:
                mine = digests(work, share((path.name for path in work.iterdir()), self._process, processes))
            except OSError as raised:
                raise self._explained(raised) from None
        record = RunRecord(
            progress=progress,
            recipe=recipe,
            processes=processes,
            samples=samples,
            sha256={name: digest for part in self._gather(mine) for name, digest in part.items()},
            files={},
            dataset_commits=dataset_commits or {},
        )
        with self._together():
            if self._main:
                try:
                    self._publish(work, final, record)
                    if not progress.skipped_in_a_row:
                        self.prune()
                except OSError as raised:
                    shutil.rmtree(work, ignore_errors=True)
                    raise self._explained(raised) from None
        return final

    def _publish(self, work: Path, final: Path, record: RunRecord) -> None:
        """Give a finished checkpoint its final name and its record."""
        files = {path.name: _size(path) for path in work.iterdir()}
        late = digests(work, files.keys() - record.sha256.keys())  # of files that a network file system showed late
        record = replace(record, sha256=record.sha256 | late, files=files)
        (work / _RECORD).write_text(json.dumps(record.as_json(), indent=2) + "\n", encoding="utf-8")
        for path in work.iterdir():
            sync(path)
        sync(work)
        if final.exists():  # left from before the run returned to an earlier step
            self._remove(int(final.name.removeprefix("step-")))
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
            dcp.load(state, checkpoint_id=self.path(step), no_dist=processes == 1, process_group=self._group())
        except (Exception, CheckpointException) as raised:
            problem = _inner(raised)
            first = next((line for line in str(problem).splitlines() if line.strip()), "")
            raise ResumeError(
                f"{self.path(step)} cannot be loaded ({type(problem).__name__}: {first[:200]}): remove it to resume from the checkpoint before it"
            ) from None

    def prune(self) -> None:
        """Remove the checkpoints that need not be kept; one process calls this."""
        for step in self.steps()[: -self._kept]:
            self._remove(step)

    def sweep(self) -> None:
        """Remove unfinished files of a killed run."""
        if self._main and self.folder.is_dir():
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
