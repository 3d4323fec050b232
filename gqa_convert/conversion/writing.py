"""Writes a plan's weight files: each tensor is copied inside the kernel, or computed in memory; every file is synced."""

import math
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from safetensors import safe_open

from gqa_convert.checkpoint.copying import BLOCK, LARGE, WrittenFile
from gqa_convert.checkpoint.dtypes import DTYPES
from gqa_convert.checkpoint.headers import build_header
from gqa_convert.checkpoint.source_files import SourceFiles
from gqa_convert.conversion.plan import OutputFile, Plan, RegroupedTensor
from gqa_convert.errors import NonFiniteError, NoSpaceError
from gqa_convert.families import layouts
from gqa_convert.merging.factorisation import Array
from gqa_convert.merging.pooling import pool_groups

Progress = Callable[[int], None]
MergedTensors = Mapping[str, Path]
"""By the names of tensors of layers that were merged as a whole, the safetensors file that holds each."""


def write_weights(plan: Plan, folder: Path, merged: MergedTensors, progress: Progress) -> dict[str, float]:
    """Write all weight files into an empty folder. One tensor at a time is in memory.

    Args:
        plan: what to write.
        folder: an empty folder.
        merged: tensors that take the place of the source's.
        progress: called with every number of bytes written.

    Returns:
        Of each tensor whose heads are merged here: |heads - merged head| / |heads|, over all its heads (Frobenius
        norms).

    Raises:
        NoSpaceError: the disk cannot hold the result.
        NonFiniteError: a tensor that is merged holds NaN or Inf.
        CorruptCheckpointError: a source file changed during the conversion.
    """
    needed = plan.disk_bytes + sum(shard.size for shard in plan.checkpoint.stored.shards if shard.spilled)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise NoSpaceError(
            f"the result needs {needed:,} bytes, and the disk of {folder.parent} has {free:,} free: make room, or name a folder on another disk"
        )
    with ExitStack() as stack:
        sources = SourceFiles(plan.checkpoint, folder, stack)
        writer = _Writer(plan, sources, merged)
        for file in plan.files:
            writer.write_file(file, folder / file.file, progress)
        sources.check_unchanged()
    return writer.errors


class _Writer:
    """Writes the files of a plan.

    Args:
        plan: what to write.
        sources: the files of the source.
        merged: tensors that take the place of the source's.
    """

    def __init__(self, plan: Plan, sources: SourceFiles, merged: MergedTensors) -> None:
        self.errors: dict[str, float] = {}
        """The relative error of each tensor whose heads were merged."""
        self._plan = plan
        self._sources = sources
        self._merged = merged
        self._touched = plan.regrouped.keys() | merged.keys()

    def write_file(self, file: OutputFile, path: Path, progress: Progress) -> None:
        """Write a whole file: the source's, or the header and then the tensors."""
        if file.shard is not None and self._touched.isdisjoint(file.names):
            source = self._sources[file.shard]
            with WrittenFile(path, source.size, progress) as out:
                out.copy(source, 0, source.size)
            return
        tensors = list(self._plan.tensors(file))
        nbytes = sum(entry.nbytes for _, entry in tensors)
        alignment = (0, 8)
        if nbytes >= LARGE:
            # whole blocks can be copied where tensors begin at the same place of a block as in the source
            located = self._sources.locate(tensors[0][0])
            alignment = (located[1].start % BLOCK if located else 0, BLOCK)
        described = [(name, entry.dtype, entry.shape, entry.nbytes) for name, entry in tensors]
        header = build_header(described, {"format": "pt"} | dict(file.metadata), data_start_modulo=alignment)
        with WrittenFile(path, len(header) + nbytes, progress) as out:
            out.write(header)
            for name, entry in tensors:
                self._write_tensor(name, entry.dtype, out)

    def _write_tensor(self, name: str, dtype: str, out: WrittenFile) -> None:
        located = None if name in self._touched else self._sources.locate(name)
        if located is not None and located[1].dtype == dtype:
            source, entry = located
            out.copy(source, entry.start, entry.nbytes)
            return
        if name in self._merged:
            with safe_open(self._merged[name], "np") as stored:
                array = stored.get_tensor(name)
        elif name in self._plan.regrouped:
            array = self._regroup(self._plan.regrouped[name])
        else:
            array = self._sources.read(name)
        out.write(_rounded(array, name, dtype).reshape(-1).view(np.uint8).data)

    def _regroup(self, tensor: RegroupedTensor) -> Array:
        """The tensor's array: heads of the source merged into groups, or repeated."""
        array = np.concatenate([self._sources.read(name) for name in tensor.sources])
        rows = array.T if tensor.transposed else array
        heads = layouts.split(np.ascontiguousarray(rows), tensor.sections)
        groups = tensor.groups
        squared_error = squared_norm = 0.0
        for number, section in enumerate(tensor.sections):
            if not section.merged:
                continue
            if groups > section.heads:
                heads[number] = heads[number].repeat(groups // section.heads, axis=0)
                continue
            assert tensor.pooling is not None, f"{tensor.name} belongs to a layer that is not merged yet"
            heads[number], error, norm = pool_groups(
                heads[number], groups, tensor.pooling, DTYPES[tensor.entry.dtype], tensor.name
            )
            squared_error += error
            squared_norm += norm
            self.errors[tensor.name] = math.sqrt(squared_error / squared_norm) if squared_norm else 0.0
        joined = layouts.join(heads, layouts.regrouped(tensor.sections, groups))
        return np.ascontiguousarray(joined.T) if tensor.transposed else joined


def _rounded(array: Array, name: str, dtype: str) -> Array:
    """An array in the type of the result.

    Raises:
        NonFiniteError: a number is too large for it.
    """
    if array.dtype == DTYPES[dtype]:
        return array
    with np.errstate(over="ignore"):
        rounded = array.astype(DTYPES[dtype])
    if np.isfinite(array).all() and not np.isfinite(rounded).all():
        raise NonFiniteError(
            f"tensor {name} would hold numbers too large for {dtype}: save the model as bfloat16 or float32 first"
        )
    return rounded
