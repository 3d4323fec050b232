"""Processes of a run that see other files or settings than the first one: one line before any step,
and nothing written.
"""

import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.demo import CHECKPOINT
from tests.helpers.ranks import Job, uptrain

RECIPE: dict[str, Any] = {
    "model": "model",
    "data": "text.txt",
    "tokens": 128,
    "tokens_per_step": 64,
    "sequence_length": 32,
    "precision": "no",
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The folders of two machines, with a model and a text of the same names."""
    home = tmp_path_factory.mktemp("machines")
    convert_checkpoint(CHECKPOINT, home / "0" / "model", 3)
    (home / "1").mkdir()
    (home / "1" / "model").symlink_to(home / "0" / "model")
    for place in ("0", "1"):
        (home / place / "text.txt").write_text("a river runs past old stones " * 400)
        (home / place / "recipe.yaml").write_text(json.dumps(RECIPE))
    return [home / "0", home / "1"]


def start(difference: str, output: str, *places: str) -> None:
    """The command line on one of two machines, of which the second one differs."""
    rank = int(os.environ["RANK"])
    os.chdir(places[rank])
    overrides = [f"output={output}"]
    with pytest.MonkeyPatch.context() as patch:
        if rank:
            if difference in ("text", "cache"):
                patch.setenv("XDG_CACHE_HOME", str(Path(output).parent / "other-cache"))
            if difference == "recipe":
                overrides.append("seed=1")
            elif difference == "sharding":
                patch.setenv("ACCELERATE_USE_FSDP", "true")
            elif difference == "text":
                Path("text.txt").write_text("a river runs past new stones " * 400)
            elif difference == "tokenising":
                patch.setattr("gqa_convert.data.encoders.TextEncoder.encode", refuse)
                patch.setattr(
                    "gqa_convert.data.token_files.wait_for_lock", lambda _: nullcontext()
                )  # no lock helps
        uptrain("recipe.yaml", *overrides)


def refuse(*_: Any) -> Any:
    raise AssertionError("another process than the first tokenises")


@pytest.mark.parametrize(
    ("difference", "message"),
    [
        (
            "recipe",
            "seed differs between the processes of this run: 0 on the first, 1 on process 1",
        ),
        ("sharding", "the number of shards differs between the processes"),
        ("text", "the training text or the tokenizer differs between the processes"),
    ],
)
def test_a_difference_is_one_line(
    places: list[Path], tmp_path: Path, difference: str, message: str
) -> None:
    job = Job(start, (difference, str(tmp_path / "out"), *map(str, places)), tmp_path / "logs", 2)
    assert job.wait(120) == [2, 2], job.text()
    assert len(job.complaints()) == 1, job.text()
    assert message in job.complaints()[0]
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("difference", ["tokenising", "cache"])
def test_the_first_process_tokenises(places: list[Path], tmp_path: Path, difference: str) -> None:
    """For all; a machine with a cache of its own makes the same tokens again."""
    where = [str(places[0])] * 2  # the text of both
    job = Job(start, (difference, str(tmp_path / "out"), *where), tmp_path / "logs", 2)
    assert job.wait(120) == [0, 0], job.text()
    assert (tmp_path / "out" / "model").is_dir()
    assert list(tmp_path.glob("other-cache/**/*.tokens")) == [] or difference == "cache"
