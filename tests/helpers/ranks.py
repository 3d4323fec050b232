"""Jobs of several processes, as a launcher would start them, without the seconds that each would
take to import torch.

Nothing here takes a job down when one of its processes dies, as
torchrun would: processes must notice by themselves.
"""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import fork_server

_LAUNCHERS = (
    "RANK",
    "LOCAL_",
    "WORLD_SIZE",
    "MASTER_",
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
        self,
        work: Callable[..., None],
        arguments: tuple[Any, ...],
        folder: Path,
        processes: int,
        **environment: str,
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
            inherited = {
                name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)
            }
            self.processes.append(
                fork_server.start(work, arguments, inherited | launcher | environment, log, log)
            )

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

    def wait_for(self, path: Path, *, filled: bool = False) -> None:
        """Until a file or folder exists, and the file has content if asked for."""
        until = time.monotonic() + 60
        while not path.exists() or (filled and not path.stat().st_size):
            if time.monotonic() > until or not any(
                process.is_alive() for process in self.processes
            ):
                self.kill()
                pytest.fail(f"{path} did not appear\n{self.text()}")
            time.sleep(0.005)

    def text(self) -> str:
        return "".join(
            f"--- {log.name}\n{log.read_text() if log.exists() else ''}" for log in self.logs
        )

    def complaints(self) -> list[str]:
        """The lines that the command line ended with, of all processes."""
        return [line for line in self.text().splitlines() if line.startswith("gqa-convert: ")]


def uptrain(*arguments: str) -> None:
    """The command line."""
    command("uptrain", *arguments)


def convert(*arguments: str) -> None:
    """The command line."""
    command("convert", *arguments)


def command(*arguments: str) -> None:
    import torch

    from gqa_convert.cli import main

    torch.set_num_threads(1)

    sys.argv = ["gqa-convert", *arguments]
    main()
