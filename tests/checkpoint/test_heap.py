"""Freed memory stays with the process inside `kept_heap`, and only there.

Each measurement is made in a process of its own: what earlier tests freed may lie on top of a worker's heap, and malloc
would take the tensors from there.
"""

import resource
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from gqa_convert.checkpoint.heap import kept_heap, trim_heap
from tests.helpers.command_line import run_python

SIZE = 48 << 20
"""Bytes, more than glibc ever takes from its heap by itself."""
CPU = torch.device("cpu")


def new_pages(times: int = 40) -> int:
    """The pages that the kernel hands out while a tensor is made and freed again and again, in tensors of this size."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(times):
        torch.empty(SIZE, dtype=torch.uint8).fill_(1)
    return (resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before) * resource.getpagesize() // SIZE


def resident() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


def freed_memory_is_used_again() -> None:
    """Small blocks in between split the heap at first, until holes are large enough."""
    outside = new_pages()
    with kept_heap(CPU):
        inside = new_pages()
    assert outside >= 39
    assert inside < 20


def memory_is_returned_at_the_end(error: type[Exception] | None = None) -> None:
    with suppress(KeyError), kept_heap(CPU):
        new_pages(1)
        held = resident()
        if error is not None:
            raise error
    assert held - resident() > SIZE / 2


def memory_is_returned_after_an_error() -> None:
    memory_is_returned_at_the_end(KeyError)


def accelerators_leave_the_heap_alone() -> None:
    with kept_heap(torch.device("meta")):
        before = resident()
        new_pages(1)
        assert resident() - before < SIZE / 2


def other_threads_find_memory() -> None:
    """Their own heaps are smaller than such a tensor."""
    found = []
    with kept_heap(CPU):
        thread = threading.Thread(target=lambda: found.append(torch.ones(SIZE, dtype=torch.uint8).sum().item()))
        thread.start()
        thread.join()
    trim_heap()
    assert found == [SIZE]


@pytest.mark.parametrize(
    "measure",
    [
        freed_memory_is_used_again,
        memory_is_returned_at_the_end,
        memory_is_returned_after_an_error,
        accelerators_leave_the_heap_alone,
        other_threads_find_memory,
    ],
)
def test_the_heap_of_a_process(measure: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    name = measure.__name__
    result = run_python("-c", f"from {__name__} import {name}; {name}(); print('measured')")
    assert (result.returncode, result.stdout) == (0, "measured\n"), result.stderr
