"""Joins the process groups of torch through which the processes of a conversion exchange sums."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from gqa_convert.conversion.fit.processes.group import ProcessGroup

_MEETING = "meeting"
_LONGEST_WAIT = timedelta(days=7)
"""On the CPU, where a process that has ended is noticed at once."""
_LONGEST_REDUCTION = timedelta(minutes=10)
"""On GPUs, where reductions begin when all processes have arrived."""
_INTERFACE = "GLOO_SOCKET_IFNAME"


@contextmanager
def joined(
    folder: Path,
    rank: int,
    device: str,
    size: int,
    *,
    watch: Callable[[], None] = lambda: None,
    lost: Callable[[], None] = lambda: None,
) -> Iterator[ProcessGroup]:
    """A context in which this process is one of several on one machine.

    Args:
        folder: an existing folder, new for these processes, in which they find one another.
        rank: of this process.
        device: on which it computes.
        size: how many processes there are.
        watch: as for `ProcessGroup`.
        lost: as for `ProcessGroup`.
    """
    with ExitStack() as stack:
        stack.enter_context(_loopback())
        meeting = distributed.FileStore(str(folder / _MEETING), size)
        distributed.init_process_group("gloo", store=meeting, rank=rank, world_size=size, timeout=_LONGEST_WAIT)
        stack.callback(distributed.destroy_process_group)
        tensors = None
        if torch.device(device).type == "cuda":
            stack.enter_context(torch.cuda.device(device))
            tensors = distributed.new_group(backend="nccl", timeout=_LONGEST_REDUCTION)
            stack.push(partial(_abort, tensors))
        processes = ProcessGroup(rank, size, control=distributed.group.WORLD, tensors=tensors, watch=watch, lost=lost)
        yield processes
        processes.wait()


def _abort(tensors: Any, kind: type[BaseException] | None, *_: object) -> None:
    """After an error, end the reductions on GPUs that wait for others."""
    if kind is not None:
        tensors.abort()


@contextmanager
def _loopback() -> Iterator[None]:
    """A context in which gloo talks inside the machine, whatever the machine's name resolves to."""
    before = os.environ.get(_INTERFACE)
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if before is None and loopback is not None:
        os.environ[_INTERFACE] = loopback
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_INTERFACE, None)
