"""Writes a source in another form into a folder, for what reads it with transformers."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from gqa_convert.checkpoint.source import CONFIG, Checkpoint, open_checkpoint
from gqa_convert.checkpoint.source_files import SourceFiles
from gqa_convert.conversion.progress import REWRITING, FitProgress, OnProgress
from gqa_convert.conversion.sidecar_files import copy_files, write_index
from gqa_convert.conversion.writing import check_room, write_file
from gqa_convert.publishing.atomic_files import write_json
from gqa_convert.publishing.publication import staged_folder


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
    with staged_folder(out) as scratch:
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
    total = sum(entry.nbytes for entry in checkpoint.entries.values())
    folder.mkdir(parents=True)
    check_room("the rewritten source, beside the result,", total, folder.parent)
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        on_progress(FitProgress(REWRITING, min(done, total), total))

    with SourceFiles(checkpoint) as sources:
        for shard in checkpoint.shards:
            write_file(folder / shard.file, shard.tensors, shard.metadata, sources, advance)
        sources.check_unchanged()
    copy_files(checkpoint, folder)
    write_json(folder / CONFIG, checkpoint.config)
    write_index(
        folder,
        {shard.file: shard.tensors for shard in checkpoint.shards},
        checkpoint.index_metadata or {},
    )
    written = open_checkpoint(folder)
    return replace(
        checkpoint,
        folder=folder,
        shards=written.shards,
        index_metadata=written.index_metadata,
        carried=written.carried,
        files=written.files,
        recipes={},
        tokenizer_defaults={},
    )
