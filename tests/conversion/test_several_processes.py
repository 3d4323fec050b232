"""A conversion that several processes share: the same decisions and the same result as by one, and
one message where it fails.
"""

import json
from pathlib import Path
from typing import Any

import pytest

import gqa_convert
from tests.helpers.ranks import Job, convert

SOURCE = Path(gqa_convert.__file__).parent / "demo_checkpoint"
OPTIONS = (
    *(
        "--groups",
        "3",
        "--calibration",
        "python-stdlib",
        "--calibration-tokens",
        "3072",
        "--no-mix",
    ),
    *("--fit-steps", "6", "--kl-steps", "6"),
)
IN_FLOAT32 = {"GQA_CONVERT_MACHINE": json.dumps({"bfloat16": False})}


def start(out: Path, processes: int, *options: str) -> Job:
    arguments = (str(SOURCE), str(out), *(options or OPTIONS))
    return Job(convert, arguments, out.parent / f"logs of {out.name}", processes, **IN_FLOAT32)


def record(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "gqa_conversion.json").read_text())
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The result of one process."""
    out = tmp_path_factory.mktemp("alone") / "out"
    job = start(out, 1)
    assert job.wait(180) == [0], job.text()
    return out


def assert_same(out: Path, alone: Path) -> None:
    """Numbers differ by rounding, decisions not at all."""
    one, several = (record(each) for each in (alone, out))
    assert several["calibration"]["digest"] == one["calibration"]["digest"]
    assert several["calibration"]["kl"]["after"] == pytest.approx(
        one["calibration"]["kl"]["after"], rel=5e-3
    )
    assert several["calibration"]["kl"]["before"] == pytest.approx(
        one["calibration"]["kl"]["before"], rel=5e-3
    )
    assert several.get("head_order") == one.get("head_order")
    for name, error in one["merge_error"].items():
        rounding = (
            1e-5 if ".layers.0." in name else 2e-3
        )  # later layers read what earlier ones were rounded to
        assert several["merge_error"][name] == pytest.approx(error, rel=rounding)


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_several_processes_yield_what_one_does(processes: int, alone: Path, tmp_path: Path) -> None:
    """Three do not divide the rows evenly: some batches have none for one of them."""
    job = start(tmp_path / "out", processes)
    assert job.wait(240) == [0] * processes, job.text()
    assert_same(tmp_path / "out", alone)
    assert "done" not in job.logs[1].read_text()


def test_killed_and_resumed_by_another_number(alone: Path, tmp_path: Path) -> None:
    """The first process is killed behind the second layer: the other one ends by itself."""
    kept = tmp_path / ".out.gqa-merging"
    job = start(tmp_path / "out", 2)
    job.wait_for(kept / "layer-00001.safetensors", filled=True)
    job.kill(0)
    assert job.wait(60)[1] == 2
    assert not (tmp_path / "out").exists()
    again = start(tmp_path / "out", 1)
    assert again.wait(180) == [0], again.text()
    assert_same(tmp_path / "out", alone)


def test_a_follower_that_dies_ends_the_run(tmp_path: Path) -> None:
    kept = tmp_path / ".out.gqa-merging"
    job = start(tmp_path / "out", 2)
    job.wait_for(kept / "layer-00000.safetensors", filled=True)
    job.kill(1)
    assert job.wait(60)[0] == 2
    assert "another process of this run has ended" in job.text()
    assert (kept / "layer-00000.safetensors").exists()


@pytest.mark.parametrize(
    ("processes", "options", "message"),
    [
        (2, ("--groups", "5"), "--groups 5 does not fit"),
        (2, ("--groups", "3", "--calibration", "no-such-file.txt"), "no-such-file.txt"),
        (
            3,
            (*OPTIONS, "--calibration-tokens", "16", "--calibration-length", "16"),
            "3 processes cannot share 2 blocks",
        ),
    ],
)
def test_a_mistake_is_told_once(
    processes: int, options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    job = start(tmp_path / "out", processes, *options)
    assert job.wait(120) == [2] * processes, job.text()
    (line,) = job.complaints()
    assert message in line


def test_methods_without_text_run_on_the_first(tmp_path: Path) -> None:
    job = start(tmp_path / "out", 2, "--groups", "3", "--method", "mean")
    assert job.wait(120) == [0, 0], job.text()
    assert (tmp_path / "out" / "config.json").is_file()


@pytest.mark.slow
def test_the_first_process_chooses_for_a_budget(tmp_path: Path) -> None:
    """By its own measurement of the whole text, while the other waits."""
    options = ("--kv-budget", "40%", *OPTIONS[2:7], "--fit-steps", "0", "--kl-steps", "0")
    jobs = [start(tmp_path / str(processes), processes, *options) for processes in (1, 2)]
    assert [job.wait(240) for job in jobs] == [[0], [0, 0]], jobs[1].text()
    one, two = (record(tmp_path / str(processes)) for processes in (1, 2))
    assert one["groups"] == two["groups"]
    assert len(set(one["groups"])) > 1
