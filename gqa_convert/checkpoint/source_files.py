"""The weight files of a checkpoint, open for reading tensors and byte ranges."""

from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gqa_convert.checkpoint.copying import SourceFile
from gqa_convert.checkpoint.dtypes import STORED
from gqa_convert.checkpoint.headers import TensorEntry
from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.errors import CorruptCheckpointError, NonFiniteError


def read_bytes(file: SourceFile, entry: TensorEntry) -> npt.NDArray[np.uint8]:
    """The bytes of a tensor of a weight file, as an array."""
    block = np.empty(entry.nbytes, np.uint8)
    file.read_into(block.data, entry.start)
    return block


def read_tensor(file: SourceFile, entry: TensorEntry) -> Any:
    """A tensor of a weight file as an array in the type of the file."""
    return read_bytes(file, entry).view(STORED[entry.dtype]).reshape(entry.shape)


class SourceFiles:
    """The source's weight files by shard number, each opened when it is first used.

    Old `.bin` files whose tensors have no usable offsets are first written out as plain bytes ("spilled").

    Tensors of a source in another form are computed when they are read.

    Args:
        checkpoint: a local one.
        work: a folder for what is written out.
        stack: closes the files when it is closed.
    """

    def __init__(self, checkpoint: Checkpoint, work: Path, stack: ExitStack) -> None:
        self._checkpoint = checkpoint.stored
        self._rewritten = checkpoint
        self._read_stored = lru_cache(maxsize=4)(self._read)  # a projection of all heads is cut into several tensors
        self._work = work
        self._stack = stack
        self._open: dict[int, SourceFile] = {}

    def __getitem__(self, number: int) -> SourceFile:
        if number not in self._open:
            shard = self._checkpoint.shards[number]
            assert self._checkpoint.folder is not None
            path = self._checkpoint.folder / shard.file
            self._check_unchanged(number)
            if shard.spilled:
                from gqa_convert.checkpoint.torch_files import spill

                spilled = self._work / f".spilled-{number}"
                spill(path, spilled)
                self._stack.callback(spilled.unlink)
                path = spilled
            self._open[number] = self._stack.enter_context(SourceFile(path))
        return self._open[number]

    def locate(self, name: str) -> tuple[SourceFile, TensorEntry] | None:
        """The file that holds a tensor, and the tensor's entry in its header; None for one that is computed."""
        recipe = self._rewritten.recipes.get(name)
        if recipe is None:
            return self._locate(name)
        return self._locate(*recipe.sources) if recipe.compute is None else None

    def read(self, name: str) -> Any:
        """A tensor as an array in the type of the file.

        Raises:
            NonFiniteError: it is computed, and holds NaN or Inf.
        """
        located = self.locate(name)
        if located is not None:
            return read_tensor(*located)
        recipe = self._rewritten.recipes[name]
        assert recipe.compute is not None
        array = recipe.compute(STORED[self._rewritten.entries[name].dtype], *map(self._read_stored, recipe.sources))
        if not np.isfinite(array).all():
            raise NonFiniteError(
                f"tensor {recipe.sources[0]} holds NaN or Inf, or {name} would: repair the checkpoint first"
            )
        return array

    def _locate(self, name: str) -> tuple[SourceFile, TensorEntry]:
        number = next(n for n, shard in enumerate(self._checkpoint.shards) if name in shard.header.tensors)
        return self[number], self._checkpoint.shards[number].header.tensors[name]

    def _read(self, name: str) -> Any:
        return read_tensor(*self._locate(name))

    def check_unchanged(self) -> None:
        """Raise CorruptCheckpointError if a file was modified after its header was read."""
        for number in self._open:
            self._check_unchanged(number)

    def _check_unchanged(self, number: int) -> None:
        shard = self._checkpoint.shards[number]
        assert self._checkpoint.folder is not None
        path = self._checkpoint.folder / shard.file
        status = path.stat()
        if (status.st_size, status.st_mtime_ns) != (shard.size, shard.modified_ns):
            raise CorruptCheckpointError(
                f"{path} has changed since its header was read: do not write to the source during a conversion, and try again"
            )
