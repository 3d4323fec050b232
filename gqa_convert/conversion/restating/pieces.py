"""Writes checkpoints that are rewritten for another model type, by ranges of bytes and by rows."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gqa_convert.checkpoint.copying import SourceFile, WrittenFile
from gqa_convert.checkpoint.dtypes import DTYPES
from gqa_convert.checkpoint.headers import TensorEntry, build_header
from gqa_convert.checkpoint.source_files import SourceFiles
from gqa_convert.conversion.restating.piece_tensors import PieceTensor
from gqa_convert.conversion.translation.rows import RowTranslator
from gqa_convert.errors import NonFiniteError

_BLOCK_NUMBERS = 1 << 16


@dataclass(frozen=True)
class PieceFile:
    """An output file: its name, its tensors and its metadata."""

    file: str
    tensors: tuple[PieceTensor, ...]
    metadata: Mapping[str, str]
    copy_of: int | None = None

    @property
    def names(self) -> list[str]:
        return [tensor.name for tensor in self.tensors]


def write_pieces(
    plan: Any,
    folder: Path,
    merged: Mapping[str, tuple[Path, TensorEntry]],
    progress: Callable[[int], None],
) -> dict[str, float]:
    """Write files into an empty folder; returns the relative merge errors of translated tensors."""
    with ExitStack() as stack:
        sources = SourceFiles(plan.checkpoint, folder, stack)
        stored = {path: stack.enter_context(SourceFile(path)) for path in {path for path, _ in merged.values()}}

        def read_rows(name: str, first: int, rows: int) -> Any:
            source, entry = (stored[merged[name][0]], merged[name][1]) if name in merged else sources.locate(name)
            row_bytes = entry.nbytes // entry.shape[0]
            block = np.empty(rows * row_bytes, np.uint8)
            source.read_into(block.data, entry.start + first * row_bytes)
            return block.view(DTYPES[entry.dtype]).reshape(rows, *entry.shape[1:])

        translator = RowTranslator(read_rows)
        for file in plan.files:
            with WrittenFile(folder / file.file, 0, progress) as out:
                if file.copy_of is not None:
                    out.copy(sources[file.copy_of], 0, sources[file.copy_of].size)
                    continue
                described = ((tensor.name, tensor.dtype, tensor.shape, tensor.nbytes) for tensor in plan.tensors(file))
                out.write(build_header(described, {"format": "pt"} | dict(file.metadata)))
                for tensor in plan.tensors(file):
                    _write(tensor, sources, translator, out)
        sources.check_unchanged()
    return translator.errors()


def _write(tensor: PieceTensor, sources: SourceFiles, translator: RowTranslator, out: WrittenFile) -> None:
    if tensor.translated:
        for block in translator.blocks(tensor.translated):
            out.write(block.view(np.uint8).reshape(-1).data)
        return
    for number, start, nbytes in tensor.pieces:
        if tensor.unit_rows:
            _write_unit_rows(tensor, sources[number], start, out)
        else:
            out.copy(sources[number], start, nbytes)


def _write_unit_rows(tensor: PieceTensor, source: SourceFile, start: int, out: WrittenFile) -> None:
    """A matrix whose rows are divided by their lengths, as torch.nn.functional.normalize does it."""
    dtype, (rows, columns) = DTYPES[tensor.dtype], tensor.shape
    step = max(1, _BLOCK_NUMBERS // columns)
    for first in range(0, rows, step):
        block = np.empty((min(step, rows - first), columns), dtype)
        source.read_into(block.view(np.uint8).reshape(-1).data, start + first * columns * dtype.itemsize)
        wide = block.astype(np.float64)
        lengths = np.sqrt(np.einsum("rc,rc->r", wide, wide))[:, None]
        if not np.isfinite(lengths).all():
            raise NonFiniteError(f"tensor {tensor.name} holds NaN or Inf: repair the checkpoint first")
        out.write((wide / np.maximum(lengths, 1e-12)).astype(dtype).view(np.uint8).reshape(-1).data)
