"""Writes a source in another form into a folder, for what reads it with transformers."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from gqa_convert.checkpoint.atomic_files import write_json
from gqa_convert.checkpoint.headers import build_header
from gqa_convert.checkpoint.publication import StagedFolder
from gqa_convert.checkpoint.source import CONFIG, Checkpoint, open_checkpoint
from gqa_convert.checkpoint.source_files import SourceFiles, read_bytes
from gqa_convert.conversion.fit.progress import REWRITING, FitProgress, OnProgress
from gqa_convert.conversion.sidecar_files import copy_files, write_index
from gqa_convert.errors import NoSpaceError


@contextmanager
def rewritten_folder(
    checkpoint: Checkpoint, out: Path, on_progress: OnProgress = lambda progress: None
) -> Iterator[Checkpoint]:
    """A source in another form, in a hidden folder beside `out` that goes at the end.

    Args:
        checkpoint: what `plan_rewriting` made of a source on this machine.
        out: a folder on the disk that has room.
        on_progress: as `write_rewritten` calls it.
    """
    with StagedFolder(out) as scratch:
        yield write_rewritten(checkpoint, scratch.path / "source", on_progress)


def write_rewritten(
    checkpoint: Checkpoint, folder: Path, on_progress: OnProgress = lambda progress: None
) -> Checkpoint:
    """Write a source in another form into a new folder. One of its tensors and four of the source's are in memory at most.

    Args:
        checkpoint: what `plan_rewriting` made of a source on this machine.
        folder: where to write.
        on_progress: called with the bytes of tensors that are written.

    Returns:
        The checkpoint in the folder, under the name of the source.

    Raises:
        NonFiniteError: a tensor that is multiplied holds NaN or Inf, or its product does.
        NoSpaceError: the disk cannot hold the result.
        CorruptCheckpointError: a file of the source changed meanwhile.
    """
    folder.mkdir(parents=True)
    done, total = 0, sum(entry.nbytes for *_, entry in checkpoint.tensors())
    free = shutil.disk_usage(folder).free
    if total > free:
        raise NoSpaceError(
            f"the rewritten source needs {total:,} bytes beside the result, and the disk of {folder.parent.parent} has "
            f"{free:,} free: make room, or name a folder on another disk"
        )
    with ExitStack() as stack:
        sources = SourceFiles(checkpoint, folder, stack)
        for shard in checkpoint.shards:
            tensors = shard.header.tensors
            described = [(name, entry.dtype, entry.shape, entry.nbytes) for name, entry in tensors.items()]
            with (folder / shard.file).open("wb") as file:
                file.write(build_header(described, {"format": "pt"} | shard.header.metadata))
                for name, entry in tensors.items():
                    located = sources.locate(name)
                    array = read_bytes(*located) if located else sources.read(name).reshape(-1).view(np.uint8)
                    file.write(array.data)
                    done += entry.nbytes
                    on_progress(FitProgress(REWRITING, done, total))
        sources.check_unchanged()
    copy_files(checkpoint, folder)
    write_json(folder / CONFIG, checkpoint.config)
    files = {shard.file: shard.header.tensors.keys() for shard in checkpoint.shards}
    write_index(folder, files, checkpoint.index_metadata or {})
    written = open_checkpoint(folder)
    return replace(
        checkpoint,
        folder=folder,
        shards=written.shards,
        index_metadata=written.index_metadata,
        carried=written.carried,
        sizes=written.sizes,
        recipes={},
        tokenizer_defaults={},
    )
