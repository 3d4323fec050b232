"""The weight files of a checkpoint, open for reading tensors and byte ranges."""

import io
import os
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from gqa_convert.errors import CorruptCheckpointError, NonFiniteError

from .dtypes import STORED
from .headers import TensorEntry
from .source import Checkpoint, Recipe
from .torch_files import bytes_of, load_tensors


class SourceFile(io.FileIO):
    """A file whose byte ranges are read."""

    def fill(self, view: memoryview, start: int) -> None:
        """Fill `view` with the bytes from `start`.

        Raises:
            CorruptCheckpointError: the file ends too early, or cannot be read.
        """
        while view:
            try:
                done = os.preadv(self.fileno(), [view], start)
            except OSError as problem:
                raise CorruptCheckpointError(
                    f"{self.name} cannot be read ({problem.strerror}): "
                    "check the disk, or copy the file again"
                ) from None
            if done == 0:
                raise self.ended()
            view, start = view[done:], start + done

    def ended(self) -> CorruptCheckpointError:
        """The error for a file that is shorter than its header says."""
        return CorruptCheckpointError(
            f"{self.name} became shorter while it was being read: "
            "copy it again, and do not write to it during a conversion"
        )


class SourceFiles(ExitStack):
    """The weight files of a local checkpoint, each opened when it is first used, as a context that
    closes them.

    Tensors of a source in another form are computed when they are read.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        self._checkpoint = checkpoint
        self._stored = checkpoint.stored
        self._entries = {name: (number, entry) for number, name, entry in self._stored.tensors()}
        self._opened: dict[int, Any] = {}
        # a projection of all heads is cut into several tensors
        self._read_cached = lru_cache(maxsize=4)(self._read_stored)

    def __getitem__(self, number: int) -> Any:
        """An open `SourceFile`, or the tensors of a `.bin` file by name."""
        if number not in self._opened:
            path = self._unchanged(number)
            is_torch = self._stored.weights_format == "torch"
            self._opened[number] = (
                load_tensors(path) if is_torch else self.enter_context(SourceFile(path))
            )
        return self._opened[number]

    def locate(self, name: str) -> tuple[SourceFile, TensorEntry] | None:
        """The file that holds a tensor's bytes, and its entry in the header; None for one that
        torch reads, or that is computed.
        """
        recipe = self._checkpoint.recipes.get(name, Recipe((name,), None))
        if self._stored.weights_format == "torch" or recipe.compute:
            return None
        number, entry = self._entries[recipe.sources[0]]
        return self[number], entry

    def read(self, name: str) -> Any:
        """A tensor as an array in the type of the file.

        Raises:
            NonFiniteError: it is computed, and holds NaN or Inf.
        """
        recipe = self._checkpoint.recipes.get(name, Recipe((name,), None))
        if recipe.compute is None:
            return self._read_stored(recipe.sources[0])
        dtype = STORED[self._checkpoint.entries[name].dtype]
        array = recipe.compute(dtype, *map(self._read_cached, recipe.sources))
        if not np.isfinite(array).all():
            raise NonFiniteError(
                f"tensor {recipe.sources[0]} holds NaN or Inf, or {name} would: "
                "repair the checkpoint first"
            )
        return array

    def _read_stored(self, name: str) -> Any:
        number, entry = self._entries[name]
        file = self[number]
        if isinstance(file, SourceFile):
            block = np.empty(entry.nbytes, np.uint8)
            file.fill(block.data, entry.start)
        else:
            block = bytes_of(file[name])
        return block.view(STORED[entry.dtype]).reshape(entry.shape)

    def check_unchanged(self) -> None:
        """Raise CorruptCheckpointError if a file was modified after its header was read."""
        for number in self._opened:
            self._unchanged(number)

    def _unchanged(self, number: int) -> Path:
        """The path of a file, which must be as it was when its header was read."""
        shard = self._stored.shards[number]
        path = self._stored.local_folder / shard.file
        status = path.stat()
        if (status.st_size, status.st_mtime_ns) != (shard.size, shard.modified_ns):
            raise CorruptCheckpointError(
                f"{path} has changed since its header was read: "
                "do not write to the source during a conversion, and try again"
            )
        return path
