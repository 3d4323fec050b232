"""Whole runs on several processes: what ends them, and how they go on."""

import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.demo import CHECKPOINT
from gqa_convert.errors import LaunchError
from gqa_convert.processes import check_environment
from tests.helpers.ranks import Job, free_port, uptrain
from tests.helpers.uptrain_runs import MEASURED

pytestmark = pytest.mark.slow

STEPS = 8
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
}
"""What accelerate sets for fsdp2.yaml."""
BY_TORCHRUN = {
    "WORLD_SIZE": "2",
    "RANK": "1",
    "LOCAL_RANK": "1",
    "GROUP_WORLD_SIZE": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a converted model, text and a recipe."""
    folder = tmp_path_factory.mktemp("runs")
    convert_checkpoint(CHECKPOINT, folder / "model", 3)
    words = random.Random(0).choices([f"word{number}" for number in range(500)], k=20_000)
    (folder / "text.txt").write_text(" ".join(words))
    recipe = {
        "model": str(folder / "model"),
        "data": str(folder / "text.txt"),
        "tokens": STEPS * 160,
        "tokens_per_step": 160,
        "sequence_length": 32,
        "micro_batch_size": 2,
        "learning_rate": 1e-3,
        "precision": "no",
        "save_every": 2,
        "output": "o",
        "keep_checkpoints": STEPS,
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return folder


def start(
    place: Path, output: Path, *overrides: str, processes: int = 2, **environment: str
) -> Job:
    arguments = (str(place / "recipe.yaml"), f"output={output}", *overrides)
    logs = output.parent / f"{output.name}-logs"
    return Job(
        uptrain, arguments, logs, processes, XDG_CACHE_HOME=str(place / "cache"), **environment
    )


def result(output: Path) -> tuple[bytes, list[dict[str, Any]]]:
    """The trained weights and the log without its times."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return (output / "model" / "model.safetensors").read_bytes(), [
        {key: value for key, value in line.items() if key not in ("tokens_per_second", *MEASURED)}
        for line in lines
    ]


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def whole(request: pytest.FixtureRequest, place: Path) -> tuple[str, dict[str, str], Path]:
    """A run that nothing interrupted."""
    environment = FSDP if request.param == "fsdp" else {}
    job = start(place, place / request.param, **environment)
    assert job.wait() == [0, 0], job.text()
    return request.param, environment, place / request.param


def test_a_job_that_was_killed_goes_on_bit_for_bit(
    place: Path, tmp_path: Path, whole: tuple[str, dict[str, str], Path]
) -> None:
    """First everything is killed, then one process, whose partner must not wait for ever."""
    _, environment, reference = whole
    output = tmp_path / "out"
    job = start(place, output, **environment)
    job.wait_for(output / "checkpoints" / "step-000002")
    time.sleep(random.random() * 0.1)
    job.kill()
    job.wait()
    job = start(place, output, **environment)
    job.wait_for(output / "checkpoints" / "step-000004")
    job.kill(rank=1)
    codes = job.wait(30)
    assert codes in ([2, -signal.SIGKILL], [0, 0]), job.text()
    assert codes == [0, 0] or "another process of this run has ended" in job.complaints()[0]
    job = start(place, output, **environment)
    assert job.wait() == [0, 0], job.text()
    assert result(output) == result(reference)


def test_a_signal_to_one_process_stops_and_saves_all(
    place: Path, tmp_path: Path, whole: tuple[str, dict[str, str], Path]
) -> None:
    kind, environment, reference = whole
    output = tmp_path / "out"
    job = start(place, output, "save_every=100", **environment)
    job.wait_for(output / "metrics.jsonl", filled=True)
    job.kill(0 if kind == "ddp" else 1, signal.SIGUSR1)
    assert job.wait() == [75, 75], job.text()
    assert len(job.complaints()) == 1, job.text()
    assert "stopped by SIGUSR1 after step" in job.complaints()[0]
    (saved,) = (output / "checkpoints").iterdir()
    assert saved.name.startswith("step-")
    job = start(place, output, **environment)
    assert job.wait() == [0, 0], job.text()
    assert result(output) == result(reference)


def test_checkpoints_fit_other_numbers_of_processes(
    place: Path, tmp_path: Path, whole: tuple[str, dict[str, str], Path]
) -> None:
    """Half a run on two processes, the rest on one, and the other way round."""
    kind, environment, reference = whole
    losses = [line["loss"] for line in result(reference)[1]]
    for number in (1, 2):
        output = tmp_path / str(number)
        shutil.copytree(reference, output)
        shutil.rmtree(output / "model")
        for step in (6, 8):
            shutil.rmtree(output / "checkpoints" / f"step-{step:06d}")
        if number == 1:
            job = start(place, output, processes=1)
        else:  # a sharded one on copies, and the other way round
            job = start(place, output, **({} if kind == "fsdp" else FSDP))
        assert set(job.wait()) == {0}, job.text()
        assert "resuming from" in job.text()
        assert [line["loss"] for line in result(output)[1]] == pytest.approx(losses, rel=1e-5)
    job = start(place, tmp_path / "one", "save_every=4", processes=1)
    assert job.wait() == [0], job.text()
    shutil.rmtree(tmp_path / "one" / "checkpoints" / "step-000008")
    job = start(place, tmp_path / "one", **environment)
    assert job.wait() == [0, 0], job.text()
    assert [line["loss"] for line in result(tmp_path / "one")[1]] == pytest.approx(losses, rel=1e-5)


def test_what_only_the_first_process_finds_ends_all(place: Path, tmp_path: Path) -> None:
    """A locked output, and text that only the process that tokenises looks at: one line, exit code
    2 everywhere.
    """
    (tmp_path / "locked").mkdir()
    with (tmp_path / "locked" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        job = start(place, tmp_path / "locked")
        assert job.wait(30) == [2, 2], job.text()
        assert len(job.complaints()) == 1, job.text()
        assert "another process is training into" in job.complaints()[0]
    job = start(place, tmp_path / "missing", "data=nowhere.txt")
    assert job.wait(30) == [2, 2], job.text()
    assert len(job.complaints()) == 1, job.text()


def uptrain_with_a_stale_view(hidden: str, *arguments: str) -> None:
    """The command line. The second process does not see the newest checkpoint in its folder, or not
    at all.
    """
    with pytest.MonkeyPatch.context() as patch:
        if os.environ["RANK"] == "1":
            name = {"in the list": "glob", "at all": "open"}[hidden]
            original = getattr(Path, name)

            def stale(path: Path, *values: Any, **options: Any) -> Any:
                if name == "open":
                    if "step-000006" in str(path):
                        raise FileNotFoundError(path)
                    return original(path, *values, **options)
                return [
                    each
                    for each in original(path, *values, **options)
                    if "step-000006" not in each.name
                ]

            patch.setattr(Path, name, stale)
        uptrain(*arguments)


@pytest.mark.parametrize("hidden", ["in the list", "at all"])
def test_all_resume_where_the_first_process_does(
    place: Path, tmp_path: Path, whole: tuple[str, dict[str, str], Path], hidden: str
) -> None:
    """As on a shared file system that shows one machine an old list of a folder; or where output is
    not shared.
    """
    _, environment, reference = whole
    output = tmp_path / "out"
    shutil.copytree(reference, output)
    for path in (output / "model", output / "checkpoints" / "step-000008"):
        shutil.rmtree(path)
    arguments = (hidden, str(place / "recipe.yaml"), f"output={output}")
    cache = str(place / "cache")
    job = Job(
        uptrain_with_a_stale_view,
        arguments,
        tmp_path / "logs",
        2,
        XDG_CACHE_HOME=cache,
        **environment,
    )
    if hidden == "in the list":
        assert job.wait() == [0, 0], job.text()
        assert result(output) == result(reference)
    else:
        assert job.wait() == [2, 2], job.text()
        assert len(job.complaints()) == 1, job.text()
        assert "step-000006, which process 1 does not see" in job.text()
        assert not (output / "model").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set and RANK is not"),
        ({"RANK": "0"}, "WORLD_SIZE is not"),
        ({"WORLD_SIZE": "two"}, "expected a whole number"),
        ({"MASTER_ADDR": "127.0.0.1"}, "MASTER_ADDR is set and WORLD_SIZE is not"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, "4 tasks were started"),
        (BY_TORCHRUN | {"SLURM_STEP_NUM_TASKS": "2"}, "2 tasks were started"),
        (BY_TORCHRUN | {"MASTER_PORT": ""}, "MASTER_PORT is not"),
        (
            BY_TORCHRUN | {"ACCELERATE_USE_DEEPSPEED": "true"},
            "does not use the optimizer and checkpoints of DeepSpeed",
        ),
        (BY_TORCHRUN | FSDP | {"FSDP_OFFLOAD_PARAMS": "true"}, "keeps parameters on the GPUs"),
        (BY_TORCHRUN | FSDP | {"FSDP_ACTIVATION_CHECKPOINTING": "true"}, "gradient_checkpointing"),
    ],
)
def test_launches_that_are_not_what_they_look_like_are_refused(
    changes: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", changes)
    with pytest.raises(LaunchError, match=message):
        check_environment()


def by_launcher(place: Path, output: Path, *launcher: str) -> "subprocess.Popen[str]":
    """The command by a launcher that is a module of Python."""
    kept = ("PATH", "PYTHONPATH", "HOME", "VIRTUAL_ENV", "HF_HUB_OFFLINE")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    environment |= {
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(place / "cache"),
    }
    run = ["-m", "gqa_convert", "uptrain", str(place / "recipe.yaml"), f"output={output}"]
    return subprocess.Popen(
        [sys.executable, "-m", *launcher, *run],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_two_machines_are_as_two_processes_of_one(place: Path, tmp_path: Path) -> None:
    """Two torchruns that find each other over the loopback device."""
    launcher = (
        "torch.distributed.run --nnodes 2 --nproc_per_node 1 --rdzv_id 1 --rdzv_backend c10d "
        "--rdzv_endpoint"
    )
    words = [*launcher.split(), f"127.0.0.1:{free_port()}", "--node_rank"]
    nodes = [by_launcher(place, tmp_path / "out", *words, str(rank)) for rank in (0, 1)]
    for node in nodes:
        text, _ = node.communicate(timeout=90)
        assert node.returncode == 0, text
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["processes"] == 2
    assert summary["steps"] == STEPS
