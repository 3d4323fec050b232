"""What the processes of a calibrated conversion, one per device, exchange.

They keep one invariant: **all processes hold the same heads and take the same decisions.**

- Whatever depends on text is a sum over its sequences, of which each process computes some. `add_up` and `totals` give
  all processes the sum over all sequences.
- What is solved from such sums (the order of heads, closed forms, regressions) would be rounded otherwise with another
  number of threads or on another GPU. Only the first process solves it, and `from_first` gives it to the others.
- The rest is computed element by element from equal numbers: the optimizer's steps, and the assembly of parameters.

`check_equal` compares each merged layer, so that a breach is an error and no wrong result.
"""

import hashlib
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Never, TypeVar

import numpy as np
import torch
from torch import Tensor, distributed

from gqa_convert.errors import WorkerError

T = TypeVar("T")

_PAUSE = 2e-4
"""Seconds between looks at a collective that is under way."""


class LostProcessError(Exception):
    """Another process has ended, and this one is not the first, which knows why."""


class ProcessGroup:
    """One process among those of a conversion; without arguments, the only one.

    All processes call the same methods in the same order.

    Args:
        rank: its number; the first process, 0, alone writes files and reports progress.
        size: how many processes there are.
        control: a process group of torch for tensors on the CPU.
        tensors: another one for tensors on GPUs; None where all are on the CPU.
        watch: called while this process waits for others; raises an error if one of them has failed.
        lost: called when a collective fails; raises the reason.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        *,
        control: Any = None,
        tensors: Any = None,
        watch: Callable[[], None] = lambda: None,
        lost: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank, self.size = rank, size
        self._control, self._tensors, self.watch, self._lost = control, tensors, watch, lost

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its sum over all processes."""
        if self.size == 1:
            return
        ready = False
        for tensor in tensors:
            if tensor.device.type == "cpu":
                self._reduce(tensor)
                continue
            if not ready:  # NCCL would wait minutes for a process that has ended
                self.wait()
                ready = True
            try:
                distributed.all_reduce(tensor, group=self._tensors)
            except RuntimeError as problem:
                self._fail(problem)

    def totals(self, numbers: Sequence[float]) -> list[float]:
        """The sum of each number over all processes, in float64."""
        if self.size == 1:
            return list(numbers)
        summed = torch.tensor(numbers, dtype=torch.float64)
        self._reduce(summed)
        return [float(number) for number in summed]

    def largest(self, numbers: Sequence[int]) -> list[int]:
        """The largest value of each number in any process."""
        if self.size == 1:
            return list(numbers)
        found = torch.tensor(numbers, dtype=torch.int64)
        self._reduce(found, distributed.ReduceOp.MAX)
        return [int(number) for number in found]

    def all(self, holds: bool) -> bool:
        """Whether something holds for every process."""
        return self.totals([holds]) == [self.size]

    def from_first(self, made: Callable[[], T]) -> T:
        """What a function returns in the first process; the others do not call it.

        Args:
            made: returns numbers, arrays and tensors, which arrive on the CPU.
        """
        if self.size == 1:
            return made()
        value = made() if self.is_first else None
        sent = pickle.dumps(value, protocol=5) if self.is_first else b""
        (nbytes,) = self.largest([len(sent)])
        block = np.empty(nbytes, np.uint8)
        if self.is_first:
            block[:] = np.frombuffer(sent, np.uint8)
        self._finish(lambda: distributed.broadcast(torch.from_numpy(block), 0, group=self._control, async_op=True))
        return value if self.is_first else pickle.loads(block.data)  # type: ignore[return-value]

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """A context that one process after the other enters."""
        for rank in range(self.size):
            if rank == self.rank:
                yield
            self.wait()

    def wait(self) -> None:
        """Wait until all processes have arrived."""
        self.totals([0.0])

    def check_equal(self, name: str, arrays: Mapping[str, Any]) -> None:
        """Refuse arrays that differ between processes.

        Args:
            name: of what they belong to, for the message.
            arrays: by name.

        Raises:
            WorkerError: a process has others.
        """
        if self.size == 1:
            return
        digest = hashlib.sha256()
        for key, array in sorted(arrays.items()):
            digest.update(f"{key} {array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).view(np.uint8).data)
        own = list(digest.digest())
        if self.largest([*own, *(-byte for byte in own)]) != [*own, *(-byte for byte in own)]:
            raise WorkerError(
                f"the devices have computed different numbers for {name}, and nothing of it was written: repeat the command, "
                "and if it happens again, name one device with --device"
            )

    def _reduce(self, tensor: Tensor, operation: Any = distributed.ReduceOp.SUM) -> None:
        self._finish(lambda: distributed.all_reduce(tensor, operation, group=self._control, async_op=True))

    def _finish(self, started: Callable[[], Any]) -> None:
        """Run a collective on the CPU. This process keeps looking, so that signals and failures are noticed meanwhile."""
        try:
            work = started()
            while not work.is_completed():
                self.watch()
                time.sleep(_PAUSE)
            work.wait()
        except RuntimeError as problem:
            self._fail(problem)

    def _fail(self, problem: RuntimeError) -> Never:
        self._lost()
        raise LostProcessError(str(problem)) from None


ALONE = ProcessGroup()
"""A conversion on one device."""
