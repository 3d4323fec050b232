"""Keeps the tensors of paused passes in memory-mapped files, so that little of them is resident."""

import ctypes
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
from torch import Tensor

from gqa_convert.checkpoint.heap import trim_heap

_LEAST = 4096
"""The size in bytes from which a tensor is moved to a file."""
_MADV_DONTNEED = 4
_LIBC = ctypes.CDLL(None)


def mapped_file(folder: Path, nbytes: int) -> Tensor:
    """A new file as a tensor of bytes [nbytes]. The file has no name and lives as long as the tensor.

    Raises:
        OSError: the disk is full. The space is reserved immediately, because running out of it through a mapping would
            kill the process.
    """
    with NamedTemporaryFile(dir=folder, prefix="waiting-") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        return torch.from_file(file.name, shared=True, size=nbytes, dtype=torch.uint8)


class Spill:
    """The files of one pass. They have no names, so that none remains after the program ends in whatever way.

    Args:
        folder: an existing folder.
        twin: the spill of the pass that shares tensors with this one.
    """

    def __init__(self, folder: Path, twin: "Spill | None" = None) -> None:
        self._folder, self._twin = folder, twin
        self._maps: dict[int, Tensor] = {}
        """The files by address. While they are referenced here, no other memory can have these addresses."""

    def take(self, frame: Any, others: Iterable[Any], kept: frozenset[int]) -> None:
        """Move tensors to files in place, and drop the files of tensors that no longer exist.

        Args:
            frame: the innermost paused frame; its variables and those of its callers are searched.
            others: further objects to search: tensors, and tuples, lists and dicts of tensors.
            kept: addresses of storages that stay in memory, such as weights.
        """
        self.drop()  # including files that are dropped below: a frame's last snapshot of its variables may still refer to them
        found: dict[int, list[Tensor]] = {}
        seen: set[int] = set()
        for tensor in (*_held_by_frames(frame, seen), *_held(list(others), seen)):
            storage = tensor.untyped_storage()
            if tensor.device.type == "cpu" and storage.nbytes() >= _LEAST and storage.data_ptr() not in kept:
                found.setdefault(storage.data_ptr(), []).append(tensor)
        known = self._maps | (self._twin._maps if self._twin is not None else {})
        self._maps = {address: known[address] for address in found if address in known}
        for address, tensors in found.items():
            if address not in known:
                self._move(tensors)
        found.clear()
        self.drop()
        trim_heap()  # otherwise malloc keeps the memory of the moved tensors

    def _move(self, tensors: list[Tensor]) -> None:
        storage = tensors[0].untyped_storage()
        mapped = mapped_file(self._folder, storage.nbytes())
        mapped.untyped_storage().copy_(storage)
        self._maps[mapped.data_ptr()] = mapped
        with torch.no_grad():
            for tensor in tensors:
                tensor.set_(mapped.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())

    def drop(self) -> None:
        """Drop the pages of all files from the resident memory; they are read again on use."""
        for address, mapped in self._maps.items():
            _LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(mapped.numel()), _MADV_DONTNEED)


def _held_by_frames(frame: Any, seen: set[int]) -> Iterator[Tensor]:
    while frame is not None:
        yield from _held(list(frame.f_locals.values()), seen)
        frame = frame.f_back


def _held(place: Any, seen: set[int]) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dicts, each object once, except parameters."""
    if id(place) in seen:
        return
    seen.add(id(place))
    if isinstance(place, Tensor):
        if not isinstance(place, torch.nn.Parameter) and place.layout == torch.strided:
            yield place
    elif isinstance(place, dict):
        for each in place.values():
            yield from _held(each, seen)
    elif isinstance(place, (tuple, list)):
        for each in place:
            yield from _held(each, seen)
