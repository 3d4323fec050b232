"""What the processes of a conversion leave for one another in a folder: the call to make, and why one failed."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gqa_convert import errors
from gqa_convert.conversion.fit.processes.group import ProcessGroup
from gqa_convert.errors import GQAConvertError, WorkerError

LOST = 3
"""The exit code of a process that has ended because another had."""


@dataclass(frozen=True, slots=True)
class Job:
    """A call that every process makes, with `device` and `processes` of its own; all of it can be pickled."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    def run(self, device: str, processes: ProcessGroup) -> Any:
        return self.function(*self.arguments, **self.options, device=device, processes=processes)


def job_file(folder: Path) -> Path:
    return folder / "job"


def ready_file(folder: Path, rank: int) -> Path:
    """Which exists once a process is about to join the others."""
    return folder / f"ready-{rank}"


def failure_file(folder: Path, rank: int) -> Path:
    return folder / f"failure-{rank}"


def write_failure(path: Path, problem: Exception) -> None:
    """Leave an error to the first process."""
    path.write_text(json.dumps([type(problem).__name__, str(problem)]), encoding="utf-8")


def read_failure(path: Path, device: str) -> GQAConvertError | None:
    """The error that a process has left; None where it left none.

    Args:
        path: of the file.
        device: of the process.
    """
    try:
        name, text = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    known = getattr(errors, name, None)
    if isinstance(known, type) and issubclass(known, GQAConvertError):
        return known(text)
    return WorkerError(f"the process on {device} failed with {name}: {text}")
