"""Weight files that several processes write, on one host or on many."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from gqa_convert import convert_checkpoint
from gqa_convert.cli.options import part_of_files
from gqa_convert.conversion import parts as parts_module
from gqa_convert.conversion.parts import Part, PartsFolder
from gqa_convert.errors import OptionError, OutputError, WorkerError
from tests.helpers.checkpoints import digests, write_llama

VARYING = ("created", "command")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("parts") / "source", shards=5)


@pytest.fixture(scope="module", params=["mean", "random"])
def alone(request: pytest.FixtureRequest, source: Path) -> tuple[str, Path]:
    """A method, and what one process makes with it."""
    out = source.parent / str(request.param)
    convert_checkpoint(source, out, 4, method=request.param, seed=3)
    return request.param, out


def record(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "gqa_conversion.json").read_text())
    return {key: value for key, value in found.items() if key not in VARYING}


def assert_same(out: Path, other: Path) -> None:
    """All bytes, but the time and the command in the record."""
    first, second = digests(out), digests(other)
    assert {**first, "gqa_conversion.json": ""} == {**second, "gqa_conversion.json": ""}
    assert record(out) == record(other)


def only(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("workers", [2, 9])
def test_workers_write_the_same_bytes(alone: tuple[str, Path], source: Path, workers: int, tmp_path: Path) -> None:
    method, expected = alone
    written: list[int] = []
    made = convert_checkpoint(
        source, tmp_path / "out", 4, method=method, seed=3, workers=workers, progress=written.append
    )
    assert_same(tmp_path / "out", expected)
    assert only(tmp_path) == ["out"]
    assert dict(made.merge_error) == record(expected)["merge_error"]
    weights = sum(path.stat().st_size for path in expected.glob("*.safetensors"))
    assert sum(written) == weights


def test_parts_in_any_order(alone: tuple[str, Path], source: Path, tmp_path: Path) -> None:
    method, expected = alone
    out = tmp_path / "out"
    for number, left in ((3, 4), (1, 2), (3, 2)):  # a part that is written already costs nothing
        made = convert_checkpoint(source, out, 4, method=method, seed=3, part=Part(number, 3))
        assert len(made.missing) == left
        assert made.as_json()["missing"] == list(made.missing)
        assert not out.exists()
    assert not convert_checkpoint(source, out, 4, method=method, seed=3, part=Part(2, 3)).missing
    assert_same(out, expected)
    assert only(tmp_path) == ["out"]


def test_a_part_of_another_conversion(source: Path, tmp_path: Path) -> None:
    convert_checkpoint(source, tmp_path / "out", 4, method="mean", part=Part(1, 2))
    for groups, method in ((3, "mean"), (4, "first")):
        with pytest.raises(OutputError, match="holds parts of another conversion"):
            convert_checkpoint(source, tmp_path / "out", groups, method=method, part=Part(2, 2))
    assert not (tmp_path / "out").exists()


def test_a_killed_worker_costs_its_file_alone(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, victim = PartsFolder.write, "model-00003-of-00005.safetensors"

    def dying(self: PartsFolder, shard: Any, progress: Any) -> None:
        if shard.file == victim:
            while len(self.missing(self._plan.shards)) > 1:  # the others finish theirs
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        write(self, shard, progress)

    monkeypatch.setattr(PartsFolder, "write", dying)
    with pytest.raises(WorkerError, match="was killed by SIGKILL: repeat the command") as problem:
        convert_checkpoint(source, tmp_path / "out", 4, method="mean", workers=5)
    assert "\n" not in str(problem.value)
    assert not (tmp_path / "out").exists()
    written: list[str] = []

    def counted(plan: Any, folder: Path, progress: Any) -> dict[str, float]:
        written.extend(shard.file for shard in plan.shards)
        return write_weights(plan, folder, progress)

    write_weights = vars(parts_module)["write_weights"]
    monkeypatch.setattr(PartsFolder, "write", write)
    monkeypatch.setattr(parts_module, "write_weights", counted)
    convert_checkpoint(source, tmp_path / "out", 4, method="mean", part=Part(1, 1))
    assert written == [victim]
    convert_checkpoint(source, tmp_path / "whole", 4, method="mean")
    assert_same(tmp_path / "out", tmp_path / "whole")


def test_what_a_worker_meets_is_the_error_of_the_run(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(plan: Any, *_: Any) -> dict[str, float]:
        raise OutputError(f"no room for {plan.shards[0].file}")

    monkeypatch.setattr(parts_module, "write_weights", full)
    with pytest.raises(OutputError, match="no room for model-0000"):
        convert_checkpoint(source, tmp_path / "out", 4, method="mean", workers=2)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [{"workers": 2}, {"part": Part(1, 2)}])
def test_methods_that_walk_through_the_layers_are_refused(
    source: Path, options: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match=r"merged one after another by one process.*choose one of mean, first"):
        convert_checkpoint(source, tmp_path / "out", 4, method="factor", **options)
    assert only(tmp_path) == []


def test_more_parts_than_files_are_refused(source: Path, tmp_path: Path) -> None:
    """Of five files."""
    with pytest.raises(OptionError, match=r"--part 6/6 of 5 weight files: divide them into at most 5 parts"):
        convert_checkpoint(source, tmp_path / "out", 4, method="mean", part=Part(6, 6))
    assert list(tmp_path.iterdir()) == []


def test_a_part_is_counted_from_one() -> None:
    assert part_of_files(" 2/8") == (2, 8)
    for text in ("0/2", "3/2", "2", "a/b", "1/2/3"):
        with pytest.raises(OptionError, match="is not one of N parts: write it like 2/8"):
            part_of_files(text)
