"""The commits of Hub datasets: recorded at the first start of a run, and used again whenever it resumes."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from gqa_convert.data.hub import HubDataset
from tests.helpers.uptrain_runs import make_student, run

OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_student(tmp_path_factory.mktemp("home"))


class Hub:
    """A Hub on which a dataset's `main` moves and that may be unreachable.

    Attributes:
        commit: of `main`; None where the Hub can't be reached.
        asked: how often it was asked for a commit.
    """

    def __init__(self) -> None:
        self.commit: str | None = OLD
        self.asked = 0

    def dataset_info(self, *_: Any, **__: Any) -> Any:
        self.asked += 1
        if self.commit is None:
            raise ConnectionError("no route to host")
        return type("Answer", (), {"sha": self.commit})

    @staticmethod
    def rows(text: HubDataset) -> list[dict[str, str]]:
        """Other documents at another commit."""
        return [{"text": f"{text.commit[0]} = {number}\n" * 20} for number in range(60)]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    hub = Hub()
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", hub.dataset_info)
    monkeypatch.setattr(HubDataset, "open_rows", hub.rows)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return hub


@pytest.fixture
def stopped(home: Path, hub: Hub, tmp_path: Path) -> Path:
    """The output of a run that has taken the first two of its steps; the dataset then receives a new commit."""
    output = tmp_path / "run"
    run(home, output, data="org/some", tokens=128)
    hub.commit = NEW
    return output


def resumed(home: Path, output: Path, **keys: Any) -> dict[str, Any]:
    return run(home, output, **{"data": "org/some", "tokens": 256} | keys)


def test_a_run_resumes_on_the_commit_that_it_began_with(home: Path, stopped: Path) -> None:
    """The card prints the revisions of the recipe in the model's record."""
    assert resumed(home, stopped)["steps"] == 4
    newest = json.loads((stopped / "checkpoints" / "step-000004" / "run.json").read_text())
    assert newest["dataset_commits"] == {"org/some@main": OLD}
    record = json.loads((stopped / "model" / "gqa_conversion.json").read_text())
    assert record["uptraining"][-1]["recipe"]["data"][0]["revision"] == OLD


def test_the_hub_is_not_needed_to_resume(
    home: Path, stopped: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not even on a machine whose cache is empty, for the commit."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    hub.commit, hub.asked = None, 0
    assert resumed(home, stopped)["steps"] == 4
    assert hub.asked == 0


def test_evaluation_data_keep_their_commit(home: Path, hub: Hub, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"data": str(home / "text.txt"), "evaluation_data": "org/some", "evaluation_tokens": 200}
    first = run(home, tmp_path / "run", tokens=128, **keys)
    hub.commit = NEW
    assert run(home, tmp_path / "run", tokens=256, **keys)["evaluation"]["start"] == first["evaluation"]["start"]
