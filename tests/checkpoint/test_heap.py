"""Freed memory stays with the process inside `kept_heap`, and only there."""

import resource
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from gqa_convert.checkpoint.heap import kept_heap, trim_heap

SIZE = 48 << 20
"""Bytes, more than glibc ever takes from its heap by itself."""
CPU = torch.device("cpu")


def new_pages(times: int = 40) -> int:
    """The pages that the kernel hands out while a tensor is made and freed again and again, in tensors of this size."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(times):
        torch.empty(SIZE, dtype=torch.uint8).fill_(1)
    return (resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before) * resource.getpagesize() // SIZE


def test_freed_memory_is_used_again() -> None:
    """Small blocks in between split the heap at first, until holes are large enough."""
    outside = new_pages()
    with kept_heap(CPU):
        inside = new_pages()
    assert outside >= 39
    assert inside < 20


@pytest.mark.parametrize("error", [None, KeyError])
def test_memory_is_returned_at_the_end(error: type[Exception] | None) -> None:
    with suppress(KeyError), kept_heap(CPU):
        new_pages(1)
        held = resident()
        if error is not None:
            raise error
    assert held - resident() > SIZE / 2


def test_accelerators_leave_the_heap_alone() -> None:
    with kept_heap(torch.device("meta")):
        before = resident()
        new_pages(1)
        assert resident() - before < SIZE / 2


def test_other_threads_find_memory() -> None:
    """Their own heaps are smaller than such a tensor."""
    found = []
    with kept_heap(CPU):
        thread = threading.Thread(target=lambda: found.append(torch.ones(SIZE, dtype=torch.uint8).sum().item()))
        thread.start()
        thread.join()
    trim_heap()
    assert found == [SIZE]


def resident() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()
