"""Writes a plan's weight files: copies inside the kernel, K/V heads merged on the way, every file synced."""

import math
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from gqa_convert.checkpoint.copying import OutputFile
from gqa_convert.checkpoint.direct_writing import DirectOutputFile, is_large, new_output_file
from gqa_convert.checkpoint.dtypes import DTYPES
from gqa_convert.checkpoint.headers import build_header
from gqa_convert.checkpoint.shared_blocks import BLOCK
from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.checkpoint.source_files import SourceFiles
from gqa_convert.conversion.plan import OutputShard, OutputTensor, Piece
from gqa_convert.conversion.translation.rows import RowTranslator
from gqa_convert.errors import NonFiniteError, NoSpaceError
from gqa_convert.families.target_architectures import TargetArchitecture
from gqa_convert.merging.pooling import BlockMerger

_BLOCK_NUMBERS = 1 << 16
"""Numbers merged at a time, over all heads of a group: as many as a core's cache holds in float32."""

AnyOutputFile = OutputFile | DirectOutputFile
Progress = Callable[[int], None]


class Writable(Protocol):
    """The part of a plan that decides the weights."""

    @property
    def checkpoint(self) -> Checkpoint: ...
    @property
    def shards(self) -> tuple[OutputShard, ...]: ...
    @property
    def target_architecture(self) -> TargetArchitecture | None: ...
    @property
    def disk_bytes(self) -> int: ...


def write_weights(plan: Writable, folder: Path, progress: Progress) -> dict[str, float]:
    """Write all output shards into an empty folder.

    Args:
        plan: what to write.
        folder: an empty folder.
        progress: called with every number of bytes written.

    Returns:
        Each merged tensor's relative merge error.

    Raises:
        NoSpaceError: the disk cannot hold the result.
        NonFiniteError: a tensor that is merged holds NaN or Inf.
        CorruptCheckpointError: a source file changed during the conversion.
    """
    with ExitStack() as stack:
        sources = SourceFiles(plan.checkpoint, folder, stack)
        _check_space(plan, folder, sources.shared)
        syncing = stack.enter_context(
            ThreadPoolExecutor(1)
        )  # the next file is written while the disk finishes the one before
        writer = _ShardWriter(plan, sources, progress)
        closed: list[Future[None]] = []
        for shard in plan.shards:
            closed.append(syncing.submit(writer.write(shard, folder / shard.file).close))
            if len(closed) > 1:
                closed[-2].result()  # no more than one, because a file that is not finished holds buffers
        for future in closed:
            future.result()
        sources.check_unchanged()
    return writer.errors()


def _check_space(plan: Writable, folder: Path, shared: bool) -> None:
    """Check the free space. Blocks shared with the source take none, so that only merged heads and sidecar files count."""
    needed = plan.disk_bytes + sum(shard.size for shard in plan.checkpoint.shards if shard.spilled)
    if shared:
        copied = sum(
            piece.nbytes
            for shard in plan.shards
            for tensor in shard.tensors
            for piece in tensor.pieces
            if piece.pooling is None
        )
        needed -= copied
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise NoSpaceError(
            f"the result needs {needed:,} bytes, and the disk of {folder.parent} has {free:,} free: make room, or name a folder on another disk"
        )


class _ShardWriter:
    """Writes output shards piece by piece; neighbouring copies are joined into one."""

    def __init__(self, plan: Writable, sources: SourceFiles, progress: Progress) -> None:
        self._plan = plan
        self._sources = sources
        self._progress = progress
        self._mergers: dict[tuple[int, str], BlockMerger] = {}
        self._squares: dict[str, tuple[float, float]] = {}
        self._targets = (
            {name: (number, entry) for number, name, entry in plan.checkpoint.tensors()}
            if plan.target_architecture
            else {}
        )
        self._translator = RowTranslator(self._read_rows)

    def errors(self) -> dict[str, float]:
        """Each merged tensor's |heads - merged head| / |heads|, over all its heads (Frobenius norms)."""
        pooled = {name: math.sqrt(error / norm) if norm else 0.0 for name, (error, norm) in self._squares.items()}
        return pooled | self._translator.errors()

    def _read_rows(self, name: str, first: int, rows: int) -> Any:
        """Rows [rows, ...] of a tensor of the source, or of a merged layer, which takes the place of the source's."""
        number, entry = self._targets[name]
        row_bytes = entry.nbytes // entry.shape[0]
        block = np.empty(rows * row_bytes, np.uint8)
        self._sources[number].read_into(block.data, entry.start + first * row_bytes)
        return block.view(DTYPES[entry.dtype]).reshape(rows, *entry.shape[1:])

    def write(self, shard: OutputShard, path: Path) -> AnyOutputFile:
        """Write a whole file, first the header, then the tensors. The caller closes it, which waits for the disk."""
        header, copied = b"", 0
        if shard.whole_copy_of is None:
            header = self._header(shard)
        else:
            copied = self._plan.checkpoint.shards[shard.whole_copy_of].size
        reserved = 0 if self._sources.shared else copied or len(header) + shard.nbytes
        out = new_output_file(path, reserved, self._progress)
        try:
            if shard.whole_copy_of is None:
                out.write(header)
                self._write_tensors(shard, out)
            else:
                out.copy(self._sources[shard.whole_copy_of], 0, copied)
        except BaseException:
            out.abandon()
            raise
        return out

    def _header(self, shard: OutputShard) -> bytes:
        """The header. Where blocks can be shared with the source, or written from its pages, it is padded so that the
        tensors start at the same place of a block as there.
        """
        described = ((tensor.name, tensor.dtype, tensor.shape, tensor.nbytes) for tensor in shard.tensors)
        alignment = (0, 8)
        if (self._sources.shared or is_large(shard.nbytes)) and shard.tensors and shard.tensors[0].pieces:
            alignment = (shard.tensors[0].pieces[0].ranges[0][1] % BLOCK, BLOCK)
        return build_header(described, {"format": "pt"} | shard.metadata, data_start_modulo=alignment)

    def _write_tensors(self, shard: OutputShard, out: AnyOutputFile) -> None:
        joined: tuple[int, int, int] | None = None  # source shard, start, bytes
        for tensor in shard.tensors:
            assert tensor.pieces or tensor.translated, f"{tensor.name} belongs to a layer that is not merged yet"
            if tensor.translated or tensor.rows > 1 or tensor.unit_rows:
                self._flush(joined, out)
                joined = None
                if tensor.unit_rows:
                    self._write_unit_rows(tensor, out)
                elif tensor.translated:
                    for block in self._translator.blocks(tensor.translated):
                        out.write(block.view(np.uint8).reshape(-1).data)
                else:
                    self._write_rows(tensor, out)
                continue
            for piece in tensor.pieces:
                number, start = piece.ranges[0]
                if piece.pooling is None and joined and joined[0] == number and joined[1] + joined[2] == start:
                    joined = (number, joined[1], joined[2] + piece.nbytes)
                    continue
                self._flush(joined, out)
                joined = (number, start, piece.nbytes) if piece.pooling is None else None
                if piece.pooling is not None:
                    self._merge(tensor, piece, out)
        self._flush(joined, out)

    def _flush(self, joined: tuple[int, int, int] | None, out: AnyOutputFile) -> None:
        if joined:
            number, start, nbytes = joined
            out.copy(self._sources[number], start, nbytes)

    def _merge(self, tensor: OutputTensor, piece: Piece, out: AnyOutputFile) -> None:
        assert piece.pooling is not None
        dtype = DTYPES[tensor.dtype]
        merger = self._merger(len(piece.ranges), tensor.dtype, 0)
        step = merger.source.shape[1]
        self._sources[piece.ranges[-1][0]].expect(piece.ranges[-1][1])
        for first in range(0, piece.nbytes // dtype.itemsize, step):
            count = min(step, piece.nbytes // dtype.itemsize - first)
            for row, (number, start) in zip(merger.source, piece.ranges, strict=True):
                self._sources[number].read_into(row[:count].view(np.uint8).data, start + first * dtype.itemsize)
            merged = merger.merge(count, piece.pooling, f"tensor {tensor.name}")
            out.write(merged.view(np.uint8).data)
        error, norm = self._squares.get(tensor.name, (0.0, 0.0))
        self._squares[tensor.name] = (error + merger.squared_error, norm + merger.squared_norm)

    def _write_unit_rows(self, tensor: OutputTensor, out: AnyOutputFile) -> None:
        """A matrix whose rows are divided by their lengths, as torch.nn.functional.normalize does it."""
        dtype, (rows, columns) = DTYPES[tensor.dtype], tensor.shape
        number, start = tensor.pieces[0].ranges[0]
        step = max(1, _BLOCK_NUMBERS // columns)
        for first in range(0, rows, step):
            block = np.empty((min(step, rows - first), columns), dtype)
            self._sources[number].read_into(
                block.view(np.uint8).reshape(-1).data, start + first * columns * dtype.itemsize
            )
            wide = block.astype(np.float64)
            lengths = np.sqrt(np.einsum("rc,rc->r", wide, wide))[:, None]
            if not np.isfinite(lengths).all():
                raise NonFiniteError(f"tensor {tensor.name} holds NaN or Inf: repair the checkpoint first")
            out.write((wide / np.maximum(lengths, 1e-12)).astype(dtype).view(np.uint8).reshape(-1).data)

    def _write_rows(self, tensor: OutputTensor, out: AnyOutputFile) -> None:
        """A tensor whose heads lie along its last axis: some rows at a time are read, cut into columns and merged."""
        dtype = DTYPES[tensor.dtype]
        number = tensor.pieces[0].ranges[0][0]
        base = min(start for piece in tensor.pieces for _, start in piece.ranges)
        numbers = max(piece.nbytes * len(piece.ranges) for piece in tensor.pieces) // dtype.itemsize
        step = max(1, min(tensor.rows, _BLOCK_NUMBERS // numbers))
        source = np.empty((step, tensor.stride), np.uint8)
        result = np.empty((step, tensor.nbytes // tensor.rows), np.uint8)
        error = norm = 0.0
        for first in range(0, tensor.rows, step):
            rows = min(step, tensor.rows - first)
            self._sources[number].read_into(source[:rows].reshape(-1).data, base + first * tensor.stride)
            column = 0
            for piece in tensor.pieces:
                into = result[:rows, column : column + piece.nbytes]
                column += piece.nbytes
                if piece.pooling is None:
                    start = piece.ranges[0][1] - base
                    into[:] = source[:rows, start : start + piece.nbytes]
                    continue
                count = rows * piece.nbytes // dtype.itemsize
                merger = self._merger(len(piece.ranges), tensor.dtype, count)
                for row, (_, start) in zip(merger.source, piece.ranges, strict=True):
                    row[:count].view(np.uint8).reshape(rows, -1)[:] = source[
                        :rows, start - base : start - base + piece.nbytes
                    ]
                merged = merger.merge(count, piece.pooling, f"tensor {tensor.name}")
                into[:] = merged.view(np.uint8).reshape(rows, -1)
                error, norm = error + merger.squared_error, norm + merger.squared_norm
            out.write(result[:rows].reshape(-1).data)
        if any(piece.pooling for piece in tensor.pieces):
            self._squares[tensor.name] = (error, norm)

    def _merger(self, heads: int, dtype: str, count: int) -> BlockMerger:
        """Buffers for a group of `heads` heads, at least `count` numbers each, with its sums set to zero."""
        merger = self._mergers.get((heads, dtype))
        if merger is None or merger.source.shape[1] < count:
            merger = self._mergers[heads, dtype] = BlockMerger(
                heads, DTYPES[dtype], max(1024, _BLOCK_NUMBERS // heads, count)
            )
        merger.squared_error = merger.squared_norm = 0.0
        return merger
