"""The output folder of a run: its files, a check that it belongs to a run, and its lock."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import yaml

from gqa_convert.data.sources import DatasetCommits
from gqa_convert.errors import LaunchError, OutputError
from gqa_convert.publishing.atomic_files import write_json, write_whole
from gqa_convert.publishing.locks import try_lock
from gqa_convert.publishing.publication import sweep

from .checkpoints import Checkpoints
from .metrics import RunSummary, read_metrics
from .recipe import Recipe

LOCK = ".lock"
"""The file in the output folder that a run holds locked."""


class RunFolder:
    """The output folder of a recipe.

    Attributes:
        path: the folder.
        checkpoints: in `checkpoints/`, from which the run resumes.
        model: `model/`, the result; exports on the way to it lie beside it.
        metrics: `metrics.jsonl`, a line per step.
        summary: `summary.json`, written last: a run that has it is complete.
        dataset_commits: `dataset_commits.json`, the commits of Hub datasets that the run keeps.
        recipe: `resolved_recipe.yaml`, with all defaults; it marks a folder as the output of a run.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.path = Path(recipe.output)
        self.checkpoints = Checkpoints(self.path / "checkpoints", recipe.keep_checkpoints)
        self.model = self.path / "model"
        self.metrics = self.path / "metrics.jsonl"
        self.summary = self.path / "summary.json"
        self.dataset_commits = self.path / "dataset_commits.json"
        self.recipe = self.path / "resolved_recipe.yaml"

    def refuse_foreign(self) -> None:
        """Refuse a checkpoint, and a folder in which files that no run wrote have the names of a
        run's files; other files are ignored.

        Raises:
            OutputError: there are such files.
        """
        if self.recipe.exists():
            return
        config = self.path / "config.json"
        for path in (self.checkpoints.folder, self.model, self.metrics, self.summary, config):
            if os.path.lexists(path):
                raise OutputError(
                    f"{path} exists and was not written by a run of this program: name another "
                    "output, or move it away"
                )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """A context in which no other job uses the folder, which is made if it does not exist, and
        from which what killed runs left behind is removed. If nothing was written, the folder is
        removed in the end.

        Raises:
            LaunchError: another process holds it.
        """
        made = [each for each in (self.path, *self.path.parents) if not each.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        lock = self.path / LOCK
        handle = try_lock(lock)
        if handle is None:
            raise LaunchError(
                f"another process is training into {self.path}: wait for it, or name another "
                "output; if it belongs to this job, the launcher started processes that do not "
                "know of one another"
            )
        try:
            sweep(self.path)
            self.checkpoints.sweep()
            yield
        finally:
            with suppress(OSError):  # the folder may be gone or read-only by now
                if list(self.path.iterdir()) == [lock]:
                    lock.unlink()
                    for each in made:
                        each.rmdir()
            os.close(handle)

    def begin(self, recipe: Recipe, commits: DatasetCommits, step: int) -> None:
        """Write the first files of a run, after which the folder belongs to it.

        Args:
            recipe: of the run.
            commits: that it keeps.
            step: that it resumes from; metrics of later ones, and a line cut short by a crash, are
                removed.
        """
        text = "# The recipe of this run, with all defaults; written by gqa-convert uptrain.\n"
        text += yaml.safe_dump(recipe.resolved(), sort_keys=False, allow_unicode=True)
        write_whole(self.recipe, text.encode())
        if commits:
            write_json(self.dataset_commits, commits)
        self.summary.unlink(missing_ok=True)
        lines = read_metrics(self.metrics)
        kept = [json.dumps(line) + "\n" for line in lines if line["step"] <= step]
        write_whole(self.metrics, "".join(kept).encode())

    def finished(self) -> RunSummary | None:
        """The summary of a complete run; None if the run is not complete."""
        with suppress(OSError, ValueError, TypeError):
            if (self.model / "config.json").is_file():
                return RunSummary(**json.loads(self.summary.read_bytes()))
        return None
