"""Starts the further processes of a calibrated conversion, and ends with them."""

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from gqa_convert.conversion.fit.processes.group import ALONE, ProcessGroup
from gqa_convert.conversion.fit.processes.messages import LOST, Job, failure_file, job_file, read_failure, ready_file
from gqa_convert.errors import GQAConvertError, OptionError, WorkerError

_PROGRAM = """
import json, sys
folder, rank, size, device, sys.path[:] = json.loads(sys.argv[1])
from pathlib import Path
from gqa_convert.conversion.fit.processes.worker import main
main(Path(folder), rank, size, device)
"""
_PATIENCE = 10.0
"""Seconds to wait for the reason of a failure, and for a process to end by itself."""
_PAUSE = 0.02


@contextmanager
def on_devices(devices: Sequence[str], job: Job, folder: Path) -> Iterator[ProcessGroup]:
    """A context in which a process for each device but the first makes a call, and this one is to make it on the first.

    Args:
        devices: the first is this process's.
        job: the call of the others.
        folder: for files that are gone afterwards.

    Raises:
        WorkerError: a process was killed.
        OptionError: torch cannot connect processes here.
        GQAConvertError: what a process met with.
    """
    if len(devices) == 1:
        yield ALONE
        return
    _check_torch(devices)
    from gqa_convert.conversion.fit.processes.joining import joined

    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(dir=folder, prefix="processes-")))
        job_file(folder).write_bytes(pickle.dumps(job, protocol=5))
        workers = _Workers(folder, devices)
        stack.callback(workers.end)
        workers.start()
        stack.enter_context(_divided_cores(devices))
        workers.wait_until_ready()
        with joined(folder, 0, devices[0], len(devices), watch=workers.check, lost=workers.explain) as processes:
            yield processes
        workers.finish()


def _check_torch(devices: Sequence[str]) -> None:
    from torch import distributed

    listed = ",".join(devices)
    if not distributed.is_available() or (devices[0] != "cpu" and not distributed.is_nccl_available()):
        raise OptionError(f"--device is {listed}, and this torch cannot connect processes: name one device")
    if distributed.is_initialized():
        raise OptionError(
            f"the device is {listed}, and this process has joined a process group of torch already: name one device, or convert in a process of its own"
        )


@contextmanager
def _divided_cores(devices: Sequence[str]) -> Iterator[None]:
    """A context in which torch takes this process's part of the cores, where the others need theirs."""
    import torch

    before = torch.get_num_threads()
    if devices[0] == "cpu":
        torch.set_num_threads(max(1, before // len(devices)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def started(folder: Path, rank: int, devices: Sequence[str], said: Path) -> "subprocess.Popen[bytes]":
    """Start a process.

    Args:
        folder: with the job.
        rank: of the process.
        devices: of all processes.
        said: a file for its output.
    """
    cores = max(1, len(os.sched_getaffinity(0)) // len(devices))
    environment = {"OMP_NUM_THREADS": str(cores), "TORCH_CPP_LOG_LEVEL": "ERROR"} | os.environ
    argument = json.dumps([str(folder), rank, len(devices), devices[rank], sys.path])
    with said.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, argument],
            stdin=subprocess.PIPE,  # its end says that this process has ended
            stdout=output,
            stderr=output,
            env=environment,
        )


class _Workers:
    """The processes but the first."""

    def __init__(self, folder: Path, devices: Sequence[str]) -> None:
        self._folder, self._devices = folder, devices
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        """By their ranks."""

    def start(self) -> None:
        for rank in range(1, len(self._devices)):
            self._running[rank] = started(self._folder, rank, self._devices, self._said(rank))

    def _said(self, rank: int) -> Path:
        return self._folder / f"said-{rank}"

    def wait_until_ready(self) -> None:
        """Wait until all have imported what they need."""
        while not all(ready_file(self._folder, rank).exists() for rank in self._running):
            self.check()
            time.sleep(_PAUSE)

    def check(self) -> None:
        """Raise the error of a process that has failed."""
        if any(process.poll() for process in self._running.values()):
            self.explain()

    def explain(self) -> None:
        """Raise the reason why a process has ended, once it is known.

        Raises:
            GQAConvertError: always.
        """
        until = time.monotonic() + _PATIENCE
        while True:
            found = [self._reason(rank, process.poll()) for rank, process in self._running.items()]
            reason = next(filter(None, found), None)
            if reason is not None:
                raise reason
            if time.monotonic() > until:
                raise WorkerError(f"the processes of the devices have lost one another: {_AGAIN}")
            time.sleep(_PAUSE)

    def _reason(self, rank: int, code: int | None) -> GQAConvertError | None:
        """Why a process has failed; None where it has not, or because another had."""
        if code in (None, 0, LOST):
            return None
        device = self._devices[rank]
        told = read_failure(failure_file(self._folder, rank), device)
        if told is not None:
            return told
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            how += ", perhaps because the memory is full" if -code == signal.SIGKILL else ""
        else:
            how = f"ended with exit code {code}"
        lines = self._said(rank).read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        said = f" ({last[:200]})" if last else ""
        return WorkerError(f"the process on {device} {how}{said}: {_AGAIN}")

    def finish(self) -> None:
        """Wait for the processes, whose work is done."""
        until = time.monotonic() + _PATIENCE
        while any(process.poll() is None for process in self._running.values()) and time.monotonic() < until:
            time.sleep(_PAUSE)

    def end(self) -> None:
        """Leave none running."""
        for process in self._running.values():
            process.kill()
        for process in self._running.values():
            process.wait()
            if process.stdin is not None:
                process.stdin.close()


_AGAIN = "repeat the command, which resumes from the finished layers"
