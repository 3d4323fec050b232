"""Processes of a calibrated conversion as forks of a process that has imported everything.

Only forks may join process groups: gloo's threads do not survive another fork.
"""

import os
import pickle
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from gqa_convert.conversion.fit.processes import ProcessGroup, worker
from gqa_convert.conversion.fit.processes.joining import joined

_LONGEST = 60.0


def in_processes(size: int, folder: Path, action: Callable[[ProcessGroup], Any]) -> list[Any]:
    """What an action returns in each of several processes that share a conversion; an error is returned.

    Args:
        size: how many processes.
        folder: to make.
        action: with the group of its process.
    """
    folder.mkdir()

    def act(rank: int) -> None:
        with joined(folder, rank, "cpu", size) as processes:
            try:
                found: Any = action(processes)
            except Exception as error:
                found = error
            (folder / f"found-{rank}").write_bytes(pickle.dumps(found))

    _wait([_forked(lambda rank=rank: act(rank)) for rank in range(size)])
    return [pickle.loads((folder / f"found-{rank}").read_bytes()) for rank in range(size)]


def starting_forks(pids: Path, prepare: Callable[[], None] = lambda: None) -> Callable[..., Any]:
    """A replacement for `launching.started`, which notes the number of each process in a file.

    Args:
        pids: the file.
        prepare: called in each process before its work.
    """

    def started(folder: Path, rank: int, devices: Sequence[str], said: Path) -> Any:
        said.touch()
        read, write = os.pipe()

        def act() -> None:
            os.close(write)
            os.dup2(read, 0)
            prepare()
            worker.main(folder, rank, len(devices), devices[rank])

        pid = _forked(act)
        os.close(read)
        with pids.open("a") as file:
            file.write(f"{pid}\n")
        ended: list[int] = []

        def poll(flags: int = os.WNOHANG) -> int | None:
            if not ended:
                found, status = os.waitpid(pid, flags)
                ended.extend([os.waitstatus_to_exitcode(status)] if found else [])
            return ended[0] if ended else None

        return SimpleNamespace(
            poll=poll,
            wait=lambda: poll(0),
            kill=lambda: None if ended else os.kill(pid, signal.SIGKILL),
            stdin=os.fdopen(write, "wb"),
        )

    return started


def _forked(action: Callable[[], None]) -> int:
    torch.set_num_threads(1)  # threads of kernels do not survive a fork
    pid = os.fork()
    if pid:
        return pid
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # torch's kernels fail now and then in threads of a fork
    try:
        action()
    finally:
        os._exit(0)


def _wait(pids: Sequence[int]) -> None:
    left, end = set(pids), time.monotonic() + _LONGEST
    while left:
        left = {pid for pid in left if not os.waitpid(pid, os.WNOHANG)[0]}
        if time.monotonic() > end:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            raise AssertionError("the processes wait for one another")
        time.sleep(0.01)
