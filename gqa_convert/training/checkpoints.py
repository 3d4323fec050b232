"""Checkpoints of a run: each appears whole or not at all, the newest few are kept, and a run resumes from the newest.

A checkpoint is a folder `checkpoints/step-000123` with a sharded state of model and optimizer, written by every process
for its own part (torch.distributed.checkpoint), and `run.json`, written last, which also knows every file's size and
SHA-256.
"""

import json
import re
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint.atomic_files import sync
from gqa_convert.checkpoint.resource_errors import is_disk_full
from gqa_convert.errors import GQAConvertError, NoSpaceError, ResumeError
from gqa_convert.training.digests import digests, first_difference, share
from gqa_convert.training.distributed import waiting_group

_NAME = re.compile(r"step-(\d{6,})")
_UNFINISHED = ".unfinished-"
_RECORD = "run.json"
_FORMAT = 1


@dataclass
class Progress:
    """How far a run is; everything else follows from the recipe and the step."""

    step: int = 0
    """Optimizer steps taken or skipped."""
    tokens: int = 0
    skipped: int = 0
    """Steps without an update, because a loss or a gradient was not finite."""
    skipped_in_a_row: int = 0
    evaluations: dict[str, float] = field(default_factory=dict)
    """Losses on the evaluation data: of the source, and at the start."""
    evaluated_on: str = ""
    """Fingerprint of that data."""
    changes: list[str] = field(default_factory=list)
    """What changed in the recipe on the way."""


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: `output/checkpoints`.
        keep: how many to keep.
        main: whether this is the process that publishes.
        together: a context in which one process works, and whose errors are raised on all of them.
        process: the number of this process.
        gather: every process's value, in the order of their numbers, of what each of them passes.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        *,
        main: bool,
        together: Callable[[], AbstractContextManager[None]] = nullcontext,
        process: int = 0,
        gather: Callable[[Any], list[Any]] = lambda value: [value],
    ) -> None:
        self.folder = folder
        self._keep = keep
        self._main = main
        self._together = together
        self._process = process
        self._gather = gather
        self._problems: dict[int, str] = {}
        """What is wrong with checkpoints that were found to be damaged, by step."""

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        found = [(int(match[1]), path) for path in self.folder.iterdir() if (match := _NAME.fullmatch(path.name))]
        return sorted(step for step, path in found if (path / _RECORD).is_file())

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def newest(self) -> tuple[int, dict[str, Any]] | None:
        """The step and the record of the newest checkpoint that is whole; those after it are damaged.

        Raises:
            ResumeError: there are checkpoints, and none of them is whole.
        """
        steps = self.steps()
        for step in reversed(steps):
            if step in self._problems:
                continue
            try:
                return step, self._record(step)
            except (OSError, ValueError, KeyError, TypeError) as raised:
                self._problems[step] = str(raised)
        if steps:
            problem = self._problems[steps[-1]]
            raise ResumeError(
                f"every checkpoint in {self.folder} is damaged ({problem}): remove the folder to begin anew"
            )
        return None

    def is_intact(self, step: int, record: dict[str, Any], processes: int) -> bool:
        """Whether the files of a checkpoint hold what was written. Every process calls this, and reads its share.

        Args:
            step: of the checkpoint, which `newest` passes over from here on if it is not intact.
            record: its record; one from before digests were recorded has none to compare.
            processes: how many there are.
        """
        recorded = record.get("sha256", {})
        mine = share(recorded, self._process, processes)
        found = self._gather(first_difference(self.path(step), {name: recorded[name] for name in mine}))
        problem = next(filter(None, found), "")
        if problem:
            self._problems[step] = problem
        return not problem

    def _record(self, step: int) -> dict[str, Any]:
        """What `save` was given beside the tensors, which are looked at.

        Raises:
            OSError, ValueError, KeyError, TypeError: something is missing or cut short.
        """
        folder = self.path(step)
        record: dict[str, Any] = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
        if record["format"] != _FORMAT:
            raise ValueError(f"{folder} is in format {record['format']}, this program knows {_FORMAT}")
        Progress(**record["progress"])
        for name, size in record["files"].items():
            if (found := _size(folder / name)) != size:
                raise ValueError(f"{folder / name} has {found} bytes, expected {size}")
        return record

    def set_aside_after(self, step: int) -> list[tuple[Path, str]]:
        """Rename the checkpoints after a step, which are damaged; returns their new names and what is wrong with
        them.
        """
        aside = []
        for later in self.steps():
            if later > step:
                new = self.folder / f"damaged-step-{later:06d}"
                shutil.rmtree(new, ignore_errors=True)
                self.path(later).rename(new)
                aside.append((new, self._problems.get(later, "it is not complete")))
        return aside

    def save(
        self, state: dict[str, Any], progress: Progress, recipe: dict[str, Any], processes: int, samples: str
    ) -> Path:
        """Write a checkpoint, publish it, and remove those that are too many. Every process calls this.

        While steps are skipped nothing is removed: what was saved before may be what is needed.

        Args:
            state: tensors, whole or sharded, as torch.distributed.checkpoint takes them.
            progress: where the run is.
            recipe: resolved, to be compared on resumption.
            processes: how many there are.
            samples: fingerprint of the training data, likewise.

        Raises:
            NoSpaceError: the disk is full; older checkpoints are intact.
        """
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.api import CheckpointException  # which is no Exception

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
        record = {
            "format": _FORMAT,
            "progress": asdict(progress),
            "recipe": recipe,
            "processes": processes,
            "samples": samples,
        }
        with self._together():
            try:
                mine = digests(work, share((path.name for path in work.iterdir()), self._process, processes))
            except OSError as raised:
                raise self._explained(raised) from None
        record["sha256"] = {name: digest for part in self._gather(mine) for name, digest in part.items()}
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

    def _publish(self, work: Path, final: Path, record: dict[str, Any]) -> None:
        """Give a finished checkpoint its name and its record."""
        record["files"] = {path.name: _size(path) for path in work.iterdir()}
        record["sha256"] |= digests(
            work, record["files"].keys() - record["sha256"].keys()
        )  # what a network file system showed late
        (work / _RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        for path in work.iterdir():
            sync(path)
        sync(work)
        if final.exists():  # from before the run went back to an earlier step
            self._remove(int(final.name.removeprefix("step-")))
        work.rename(final)
        sync(self.folder)

    def load(self, step: int, state: dict[str, Any], processes: int) -> None:
        """Fill `state` in place.

        Raises:
            ResumeError: the checkpoint is damaged.
        """
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.api import CheckpointException  # which is no Exception

        try:
            dcp.load(state, checkpoint_id=self.path(step), no_dist=processes == 1, process_group=waiting_group())
        except (Exception, CheckpointException) as raised:
            problem = _inner(raised)
            first = next((line for line in str(problem).splitlines() if line.strip()), "")
            raise ResumeError(
                f"{self.path(step)} cannot be loaded ({type(problem).__name__}: {first[:200]}): remove it to resume from the checkpoint before it"
            ) from None

    def prune(self) -> None:
        """Remove all but the newest; one process calls this."""
        for step in self.steps()[: -self._keep]:
            self._remove(step)

    def sweep(self) -> None:
        """Remove what a dead run left unfinished."""
        if self._main and self.folder.is_dir():
            for path in self.folder.glob(f"{_UNFINISHED}*"):
                shutil.rmtree(path, ignore_errors=True)

    def _remove(self, step: int) -> None:
        """Under another name first, so that a half-removed checkpoint is never taken for one."""
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
    """What went wrong on the first process on which something did."""
    failures = getattr(problem, "failures", None)
    return next(iter(failures.values()))[0] if failures else problem


def _size(path: Path) -> int:
    """Of a file; opening it first makes a network file system look."""
    with path.open("rb") as file:
        return file.seek(0, 2)
