"""A conversion that several processes share: the same decisions and the same result as by one, and
one message where it fails.
"""

from pathlib import Path

import pytest

from tests.helpers.shared_conversions import OPTIONS, assert_same, record, start


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The result of one process."""
    out = tmp_path_factory.mktemp("alone") / "out"
    job = start(out, 1)
    assert job.wait(180) == [0], job.text()
    return out


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
        (2, ("--kv-heads", "5"), "--kv-heads 5 does not fit"),
        (2, ("--kv-heads", "3", "--calibration", "no-such-file.txt"), "no-such-file.txt"),
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
    job = start(tmp_path / "out", 2, "--kv-heads", "3", "--method", "mean")
    assert job.wait(120) == [0, 0], job.text()
    assert (tmp_path / "out" / "config.json").is_file()


@pytest.mark.slow
def test_the_first_process_chooses_for_a_budget(tmp_path: Path) -> None:
    """By its own measurement of the whole text, while the other waits."""
    options = ("--kv-budget", "40%", *OPTIONS[2:7], "--fit-steps", "0", "--kl-steps", "0")
    jobs = [start(tmp_path / str(processes), processes, *options) for processes in (1, 2)]
    assert [job.wait(240) for job in jobs] == [[0], [0, 0]], jobs[1].text()
    one, two = (record(tmp_path / str(processes)) for processes in (1, 2))
    assert one["kv_heads"] == two["kv_heads"]
    assert len(set(one["kv_heads"])) > 1
