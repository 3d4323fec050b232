"""The files of a run beside its checkpoints, and a check that a folder belongs to a run."""

import json
from pathlib import Path

import yaml

from gqa_convert.checkpoint.atomic_files import write_whole
from gqa_convert.checkpoint.ownership import foreign_files
from gqa_convert.errors import OutputError, ResumeError
from gqa_convert.text.dataset_commits import DatasetCommits
from gqa_convert.training.output_lock import LOCK
from gqa_convert.training.recipe import Recipe, make_recipe
from gqa_convert.training.summary import RunSummary


class RunFolder:
    """The output folder of a recipe.

    Attributes:
        path: the folder.
        checkpoints: `checkpoints/`, from which the run resumes.
        model: `model/`, the result.
        metrics: `metrics.jsonl`, a line per step.
        plot: `loss.png`.
        trackers: `trackers/`, for trackers that write files.
        recipe: `resolved_recipe.yaml`, with all defaults; it marks a folder as the output of a run.
        summary: `summary.json`, written last: a run that has it is complete.
        dataset_commits: `dataset_commits.json`, the commits of Hub datasets that the run keeps.
        tracker_runs: `tracker_runs.json`, the ids under which trackers know the run.
        diverged: `diverged.json`, which exists from a divergence to the next good checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints, self.model, self.trackers = path / "checkpoints", path / "model", path / "trackers"
        self.metrics, self.plot = path / "metrics.jsonl", path / "loss.png"
        self.recipe, self.summary, self.diverged = (
            path / "resolved_recipe.yaml",
            path / "summary.json",
            path / "diverged.json",
        )
        self.dataset_commits, self.tracker_runs = path / "dataset_commits.json", path / "tracker_runs.json"

    def refuse_foreign(self) -> None:
        """Refuse a folder in which files that no run wrote have the names of a run's files; other files are ignored.

        Raises:
            OutputError: there are such files.
        """
        if not self.recipe.exists():
            for path in (
                self.checkpoints,
                self.model,
                self.trackers,
                self.metrics,
                self.plot,
                self.summary,
                self.diverged,
                self.dataset_commits,
                self.tracker_runs,
            ):
                if path.exists() or path.is_symlink():
                    raise OutputError(
                        f"{path} exists and was not written by a run of this program: name another output, or move it away"
                    )

    def foreign(self) -> list[str]:
        """The files in the folder that no run wrote, as relative paths."""
        if not self.recipe.is_file():
            return sorted(path.name for path in self.path.iterdir())
        kept = (
            self.checkpoints,
            self.model,
            self.trackers,
            self.metrics,
            self.plot,
            self.recipe,
            self.summary,
            self.diverged,
            self.dataset_commits,
            self.tracker_runs,
        )
        names = {LOCK, *(path.name for path in kept)}
        found = sorted(path.name for path in self.path.iterdir() if path.name not in names)
        if self.model.is_dir():
            found += [f"{self.model.name}/{name}" for name in foreign_files(self.model)]
        if self.checkpoints.is_dir():
            steps = [
                path.name
                for path in self.checkpoints.iterdir()
                if not path.name.startswith((".", "step-", "damaged-step-"))
            ]
            found += [f"{self.checkpoints.name}/{name}" for name in sorted(steps)]
        return found

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

    def write_recipe(self, recipe: Recipe) -> None:
        text = yaml.safe_dump(recipe.resolved(), sort_keys=False, allow_unicode=True)
        write_whole(
            self.recipe,
            f"# The recipe of this run, with all defaults; written by gqa-convert uptrain.\n{text}".encode(),
        )

    def read_commits(self) -> DatasetCommits:
        """The commits of Hub datasets that the run keeps; empty if none are recorded."""
        try:
            content = json.loads(self.dataset_commits.read_bytes())
        except (OSError, ValueError):
            return {}
        return {str(name): str(commit) for name, commit in content.items()} if isinstance(content, dict) else {}

    def finished(self) -> RunSummary | None:
        """The summary of a complete run; None if the run is not complete."""
        try:
            content = json.loads(self.summary.read_bytes())
            if not isinstance(content, dict) or not (self.model / "config.json").is_file():
                return None
            return RunSummary.from_json(content)
        except (OSError, ValueError, KeyError, TypeError):
            return None
