"""Text that is tokenised ahead of a run, which then finds it; and the commits of Hub datasets,
which a run keeps.
"""

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from gqa_convert.data import sampler, token_files
from gqa_convert.data.encoders import TextEncoder
from gqa_convert.data.files import Piece
from gqa_convert.data.hub import HubDataset
from gqa_convert.errors import InterruptedRunError, StoppedError
from gqa_convert.training.opening import tokenize_recipe
from gqa_convert.training.uptrain import uptrain_checkpoint
from tests.helpers.command_line import run as run_command
from tests.helpers.uptrain_runs import make_student, recipe, run


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_student(tmp_path_factory.mktemp("home"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("gqa_convert.data.files.PIECE", 3500)
    monkeypatch.setattr(token_files, "_BATCH_PIECES", 2)
    return tmp_path / "cache" / "gqa-convert" / "tokens"


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dataset without an end."""

    def rows(_: HubDataset) -> Iterator[dict[str, str]]:
        for number in itertools.count(1):
            yield {"text": f"def f{number}(x):\n    return x + {number}\n"}

    answer = type("Answer", (), {"sha": "a" * 40})
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: answer)
    monkeypatch.setattr(HubDataset, "open_rows", rows)
    monkeypatch.setattr(sampler, "SHUFFLE_WINDOW", 1000)
    monkeypatch.setattr(token_files, "_BATCH_PIECES", 50)


def test_the_run_finds_the_tokens(home: Path, tmp_path: Path, cache: Path) -> None:
    path = recipe(home, tmp_path / "run", evaluation_data=str(home / "other.txt"), tokens=128)
    seen: list[tuple[str, int, int]] = []
    found = tokenize_recipe(path, on_tokenize=lambda *report: seen.append(report))
    assert {label for label, _, _ in seen} == {str(home / "text.txt"), str(home / "other.txt")}
    (source,) = found.sources
    assert (source["source"], source["complete"]) == (str(home / "text.txt"), True)
    assert source["revision"] is None
    assert (found.steps, found.samples) == (2, 4)
    assert found.cache == str(cache)
    assert len(list(cache.glob("*.tokens"))) == 2
    seen.clear()
    uptrain_checkpoint(path, [], on_tokenize=lambda *report: seen.append(report))
    assert seen == []


@pytest.mark.usefixtures("stream")
def test_a_stream_is_tokenised_as_far_as_the_run_needs_it(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recipe(home, tmp_path / "run", data="org/some", tokens=6400)
    seen: list[tuple[str, int, int]] = []
    found = tokenize_recipe(path, on_tokenize=lambda *report: seen.append(report))
    (source,) = found.sources
    assert (source["revision"], source["complete"], found.samples) == ("a" * 40, False, 200)
    assert 6400 <= source["tokens"] < 9000
    assert {label for label, _, _ in seen} == {"org/some"}
    assert seen[-1][1] == seen[-1][2] >= 6400

    def unreachable(_: HubDataset) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(HubDataset, "open_rows", unreachable)
    assert uptrain_checkpoint(path, ["tokens=128"]).steps == 2  # type: ignore[union-attr]


def test_a_stopped_command_continues(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, made = recipe(home, tmp_path / "run"), [0]
    encode = TextEncoder.encode

    def counted(self: TextEncoder, pieces: Sequence[Piece]) -> Any:
        made[0] += 1
        if made[0] == stops_at:
            raise InterruptedRunError("stopped by SIGTERM: no partial result was written")
        return encode(self, pieces)

    monkeypatch.setattr(TextEncoder, "encode", counted)
    stops_at = 4
    with pytest.raises(
        StoppedError, match=r"stopped by SIGTERM: what is ready is kept, run the same command again"
    ):
        tokenize_recipe(path)
    made[0], stops_at = 0, 0
    tokenize_recipe(path)
    assert made[0] == 6 - 3  # 40,000 characters in twelve pieces


def test_the_command(home: Path, tmp_path: Path) -> None:
    path = recipe(home, tmp_path / "run")
    result = run_command("uptrain", path, "--tokenize-only", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["sources"][0]["tokens"] > 1000
    shown = run_command("uptrain", path, "--tokenize-only")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert re.search(r"^ +/.*text.txt +[\d,]+ tokens$", shown.stdout, re.MULTILINE)
    wrong = run_command("uptrain", path, "objective=span_corruption", "--tokenize-only")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("gqa-convert: objective is span_corruption")


OLD, NEW = "a" * 40, "b" * 40


class Hub:
    """A Hub on which a dataset's `main` moves and that may be unreachable; `commit` is then
    None.
    """

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
    """If the dataset has a new commit, and if the Hub can't be reached, even where the cache is
    empty. The card prints the revisions of the recipe in the model's record.
    """
    output = tmp_path / "run"
    run(home, output, data="org/some", tokens=128)
    hub.commit = moved
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    summary = run(home, output, data="org/some", tokens=256)
    assert (summary["steps"], summary["changes"]) == (
        4,
        ["from step 3: tokens was 128 and is now 256"],
    )
    record = json.loads((output / "model" / "gqa_conversion.json").read_text())
    assert record["uptraining"][-1]["recipe"]["data"][0]["revision"] == OLD


def test_evaluation_data_keep_their_commit(home: Path, hub: Hub, tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        "data": str(home / "text.txt"),
        "evaluation_data": "org/some",
        "evaluation_tokens": 200,
    }
    first = run(home, tmp_path / "run", tokens=128, **keys)
    hub.commit = NEW
    assert (
        run(home, tmp_path / "run", tokens=256, **keys)["evaluation"]["start"]
        == first["evaluation"]["start"]
    )
