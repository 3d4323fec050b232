"""Jobs of several processes, as a launcher would start them, without the seconds that each would take to import torch.

A server process imports it once and forks the others. Nothing here takes a job down when one of its processes dies, as
torchrun would: processes must notice by themselves.
"""

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "torch",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "accelerate",
        "peft",
        "transformers.models.auto.modeling_auto",
        "transformers.models.auto.tokenization_auto",
        "transformers.models.gpt2.modeling_gpt2",
        "transformers.models.llama.modeling_llama",
        "transformers.models.t5.modeling_t5",
        "gqa_convert.cli.uptrain",
        "gqa_convert.cli.console.progress",
        "gqa_convert.cli.console.training",
        "gqa_convert.data.samples",
        "gqa_convert.training.models",
        "gqa_convert.training.run",
        "gqa_convert.training.uptrain",
        "gqa_convert.training.trainer",
        "gqa_convert.training.export",
        "tests.helpers.ranks",
        "tests.helpers.distributed_steps",
    ]
)
_LAUNCHERS = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "ACCELERATE_",
    "FSDP_",
    "SLURM_",
    "OMPI_",
    "PMI_",
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Job:
    """Processes of one run.

    Args:
        work: what each does; its exit code is that of SystemExit.
        arguments: for it.
        folder: where their output goes.
        processes: how many.
        environment: beside what a launcher sets.
    """

    def __init__(
        self, work: Callable[..., None], arguments: tuple[Any, ...], folder: Path, processes: int, **environment: str
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        port = str(free_port())
        self.logs = [folder / f"rank-{rank}.log" for rank in range(processes)]
        self.processes = []
        for rank, log in enumerate(self.logs):
            launcher = {
                "ACCELERATE_USE_CPU": "true",
                "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(folder.parent / "cache")),
            }
            if processes > 1:
                launcher |= {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(processes),
                    "LOCAL_WORLD_SIZE": str(processes),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                }
            self.processes.append(
                _CONTEXT.Process(target=_rank, args=(work, arguments, log, launcher | environment), daemon=True)
            )
        for process in self.processes:
            process.start()

    def wait(self, seconds: float = 60) -> list[int]:
        """The exit codes; a process that is still there after this time fails the test."""
        until = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, until - time.monotonic()))
        late = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        self.kill()
        if late:
            pytest.fail(f"ranks {late} hang\n{self.text()}")
        return [int(process.exitcode or 0) for process in self.processes]

    def kill(self, rank: int | None = None, number: signal.Signals = signal.SIGKILL) -> None:
        for process in self.processes if rank is None else [self.processes[rank]]:
            if process.is_alive():
                os.kill(process.pid or 0, number)

    def wait_for(self, path: Path, *, filled: bool = False, seconds: float = 60) -> None:
        """Until a file or folder exists, and the file has content if asked for."""
        until = time.monotonic() + seconds
        while not path.exists() or (filled and not path.stat().st_size):
            if time.monotonic() > until or not any(process.is_alive() for process in self.processes):
                self.kill()
                pytest.fail(f"{path} did not appear\n{self.text()}")
            time.sleep(0.005)

    def text(self) -> str:
        return "".join(f"--- {log.name}\n{log.read_text() if log.exists() else ''}" for log in self.logs)

    def complaints(self) -> list[str]:
        """The lines that the command line ended with, of all processes."""
        return [line for line in self.text().splitlines() if line.startswith("gqa-convert: ")]


def _rank(work: Callable[..., None], arguments: tuple[Any, ...], log: Path, environment: dict[str, str]) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    for name in [name for name in os.environ if name.startswith(_LAUNCHERS)]:
        del os.environ[name]
    os.environ.update(environment)
    import torch

    torch.set_num_threads(1)
    work(*arguments)


def uptrain(*arguments: str) -> None:
    """The command line."""
    from gqa_convert.cli import main

    sys.argv = ["gqa-convert", "uptrain", *arguments]
    main()


def uptrain_on_its_own_machine(*arguments: str) -> None:
    """The same, as if each process ran on a machine of its own, with a cache of its own, and the model wrote short texts."""
    from gqa_convert.data import text_generation

    text_generation.LENGTH = 16  # type: ignore[misc]
    os.environ["XDG_CACHE_HOME"] += os.environ["RANK"]
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    uptrain(*arguments)
