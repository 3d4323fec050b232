"""The files of a run beside its checkpoints, a check that a folder belongs to a run, and its lock."""

import contextlib
import json
import os
from pathlib import Path

import yaml

from gqa_convert.checkpoint.atomic_files import write_json, write_whole
from gqa_convert.checkpoint.locks import try_lock
from gqa_convert.data.sources import DatasetCommits
from gqa_convert.errors import LaunchError, OutputError, ResumeError
from gqa_convert.training.metrics import RunSummary, read_summary
from gqa_convert.training.recipe import Recipe, make_recipe

LOCK = ".lock"
"""The file in the output folder that a run holds locked."""


class RunFolder:
    """The output folder of a recipe.

    Attributes:
        path: the folder.
        checkpoints: `checkpoints/`, from which the run resumes.
        model: `model/`, the result.
        trackers: `trackers/`, for trackers that write files.
        metrics: `metrics.jsonl`, a line per step.
        summary: `summary.json`, written last: a run that has it is complete.
        dataset_commits: `dataset_commits.json`, the commits of Hub datasets that the run keeps.
        recipe: `resolved_recipe.yaml`, with all defaults; it marks a folder as the output of a run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints, self.model, self.trackers = path / "checkpoints", path / "model", path / "trackers"
        self.metrics, self.summary = path / "metrics.jsonl", path / "summary.json"
        self.dataset_commits, self.recipe = path / "dataset_commits.json", path / "resolved_recipe.yaml"

    def refuse_foreign(self) -> None:
        """Refuse a folder in which files that no run wrote have the names of a run's files; other files are ignored.

        Raises:
            OutputError: there are such files.
        """
        written = (self.checkpoints, self.model, self.trackers, self.metrics, self.summary, self.dataset_commits)
        for path in written:
            if not self.recipe.exists() and os.path.lexists(path):
                raise OutputError(
                    f"{path} exists and was not written by a run of this program: name another output, or move it away"
                )

    def read_recipe(self) -> Recipe:
        """The recipe that the run was last started with.

        Raises:
            ResumeError: it can't be read.
        """
        try:
            return make_recipe(yaml.safe_load(self.recipe.read_text(encoding="utf-8")))
        except (OSError, ValueError, yaml.YAMLError) as problem:
            raise ResumeError(
                f"{self.recipe} can't be read ({str(problem).splitlines()[0]}): name another output"
            ) from None

    def begin(self, recipe: Recipe, commits: DatasetCommits) -> None:
        """Write the first files of a run, after which the folder belongs to it."""
        text = yaml.safe_dump(recipe.resolved(), sort_keys=False, allow_unicode=True)
        head = "# The recipe of this run, with all defaults; written by gqa-convert uptrain.\n"
        write_whole(self.recipe, (head + text).encode())
        if commits:
            write_json(self.dataset_commits, commits)
        self.summary.unlink(missing_ok=True)

    def read_commits(self) -> DatasetCommits:
        """The commits of Hub datasets that the run keeps; empty if none are recorded."""
        try:
            commits: DatasetCommits = json.loads(self.dataset_commits.read_bytes())
        except (OSError, ValueError):
            return {}
        return commits

    def finished(self) -> RunSummary | None:
        """The summary of a complete run; None if the run is not complete."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            if (self.model / "config.json").is_file():
                return read_summary(self.summary)
        return None


class OutputLock:
    """Holds an output folder for one job until it is released or the process ends.

    Args:
        folder: the output folder; created with its parents if it does not exist.

    Raises:
        LaunchError: another process holds it.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._made = [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        self._handle = try_lock(self._path)
        if self._handle is None:
            raise LaunchError(
                f"another process is training into {folder}: wait for it, or name another output; if it belongs to this job, the "
                "launcher started processes that do not know of one another"
            )

    def release(self) -> None:
        """Let another job use the folder. If the run was refused before it wrote anything, the files and folders that
        the lock created are removed.
        """
        if self._handle is None:
            return
        with contextlib.suppress(OSError):  # the folder may be gone or read-only by now
            if [each.name for each in self._path.parent.iterdir()] == [LOCK]:
                self._path.unlink()
                for each in self._made:
                    each.rmdir()
        os.close(self._handle)
        self._handle = None
