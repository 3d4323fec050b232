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
    """A Hub on which a dataset's `main` moves and that may be unreachable; `commit` is then None."""

    commit: str | None = OLD

    def dataset_info(self, *_: Any, **__: Any) -> Any:
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


@pytest.mark.parametrize("moved", [NEW, None])
def test_a_run_resumes_on_the_commit_that_it_began_with(
    home: Path, hub: Hub, tmp_path: Path, moved: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the dataset has a new commit, and if the Hub can't be reached, even where the cache is empty. The card prints the
    revisions of the recipe in the model's record.
    """
    output = tmp_path / "run"
    run(home, output, data="org/some", tokens=128)
    hub.commit = moved
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert run(home, output, data="org/some", tokens=256)["steps"] == 4
    record = json.loads((output / "model" / "gqa_conversion.json").read_text())
    assert record["uptraining"][-1]["recipe"]["data"][0]["revision"] == OLD


def test_evaluation_data_keep_their_commit(home: Path, hub: Hub, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"data": str(home / "text.txt"), "evaluation_data": "org/some", "evaluation_tokens": 200}
    first = run(home, tmp_path / "run", tokens=128, **keys)
    hub.commit = NEW
    assert run(home, tmp_path / "run", tokens=256, **keys)["evaluation"]["start"] == first["evaluation"]["start"]
