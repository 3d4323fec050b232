"""Writes a rewritten source, tensor by tensor, and opens a source in the form in which it is converted."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import numpy as np

from gqa_convert.checkpoint.dtypes import STORED
from gqa_convert.checkpoint.publication import StagedFolder
from gqa_convert.checkpoint.source import CONFIG, Checkpoint, download_checkpoint, open_checkpoint, open_headers
from gqa_convert.checkpoint.source_files import SourceFiles, read_bytes
from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.conversion.rewriting.arrays import Array
from gqa_convert.conversion.rewriting.model import Rewriting, RewrittenTensor
from gqa_convert.conversion.rewriting.planning import plan_rewriting
from gqa_convert.conversion.sidecar_files import copy_files, write_index, write_json
from gqa_convert.errors import NonFiniteError, NoSpaceError

Planned = TypeVar("Planned")
OnProgress = Callable[[str, int, int], None]
"""Called with what is done, how much of it is done, and all of it."""
_TOKENIZER_CONFIG = "tokenizer_config.json"


@contextmanager
def open_rewritten(
    source: str | Path,
    out: Path,
    groups: int | Sequence[int],
    options: ConversionOptions,
    plan: Callable[[Checkpoint], Planned],
    on_note: Callable[[str], None],
    on_progress: OnProgress = lambda label, done, total: None,
) -> Iterator[tuple[Checkpoint, Planned]]:
    """Open a source as a local folder, in the form in which it is converted: as it is, or rewritten in a hidden folder
    beside `out` that goes at the end. The second value is what `plan` returned.

    Args:
        source: a folder or a Hub id.
        out: a folder on the disk that has room.
        groups: K/V heads per layer in the result.
        options: of the conversion.
        plan: called once, with the headers of what will be converted, before anything is downloaded or written; an
            exception prevents it.
        on_note: called with sentences on what is rewritten and what differs.
        on_progress: as `write_rewritten` calls it.
    """
    opened = open_headers(source, options.revision, quantised=True)
    rewriting = plan_rewriting(opened, groups, native=options.native)
    planned = plan(opened if rewriting is None else rewriting.headers)
    original = download_checkpoint(opened, options.revision)
    if rewriting is None:
        yield original, planned
        return
    rewriting = replace(rewriting, source=original)
    for note in rewriting.notes:
        on_note(note)
    on_note(f"the rewritten source is in a folder beside {out}, which is deleted afterwards")
    with StagedFolder(out) as scratch:
        yield write_rewritten(rewriting, scratch.path / "source", on_progress), planned


def write_rewritten(
    rewriting: Rewriting, folder: Path, on_progress: OnProgress = lambda label, done, total: None
) -> Checkpoint:
    """Write a rewritten source into a new folder. One of its tensors and four of the source's are in memory at most.

    Args:
        rewriting: of a source on this machine.
        folder: where to write.
        on_progress: called with "rewriting the source", the bytes of tensors that are written, and all of them.

    Returns:
        The checkpoint in the folder, under the name of the source.

    Raises:
        NonFiniteError: a tensor that is multiplied holds NaN or Inf, or its product does.
        NoSpaceError: the disk cannot hold the result.
        CorruptCheckpointError: a file of the source changed meanwhile.
    """
    source, files = rewriting.source, rewriting.files
    folder.mkdir(parents=True)
    needed, free = sum(file.nbytes for file in files), shutil.disk_usage(folder).free
    if needed > free:
        raise NoSpaceError(
            f"the rewritten source needs {needed:,} bytes beside the result, and the disk of {folder.parent.parent} has "
            f"{free:,} free: make room, or name a folder on another disk"
        )
    done, total = 0, sum(tensor.nbytes for tensor in rewriting.tensors)
    with ExitStack() as stack:
        sources = SourceFiles(source, folder, stack)
        read = lru_cache(maxsize=4)(sources.read)  # a projection of all heads is cut into several tensors
        for file in files:
            with (folder / file.name).open("wb") as written:
                written.write(file.header)
                for tensor in file.tensors:
                    written.write(_data(tensor, sources, read))
                    done += tensor.nbytes
                    on_progress("rewriting the source", done, total)
        sources.check_unchanged()
    copy_files(source, folder, rewriting.carried)
    _complete_tokenizer(rewriting, folder)
    write_json(folder / CONFIG, rewriting.config)
    names = {file.name: [tensor.name for tensor in file.tensors] for file in files}
    write_index(folder, names, source.index_metadata or {})
    return replace(
        open_checkpoint(folder),
        source_id=source.source_id,
        revision=source.revision,
        left_behind=source.left_behind,
        links_out=source.links_out,
        unreachable=source.unreachable,
        result_dtypes=rewriting.result_dtypes,
        rewritten_from=source,
    )


def _data(tensor: RewrittenTensor, sources: SourceFiles, read: Callable[[str], Array]) -> memoryview:
    """The bytes of a tensor of the rewritten source."""
    if tensor.compute is None:
        return read_bytes(*sources.locate(tensor.sources[0])).data
    array: Array = tensor.compute(STORED[tensor.dtype], *map(read, tensor.sources))
    if not np.isfinite(array).all():
        raise NonFiniteError(
            f"tensor {tensor.sources[0]} holds NaN or Inf, or {tensor.name} would: repair the checkpoint first"
        )
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _complete_tokenizer(rewriting: Rewriting, folder: Path) -> None:
    """Write the defaults of the source's tokenizer class into its config, where the new class lacks them."""
    path = folder / _TOKENIZER_CONFIG
    stated = json.loads(path.read_bytes()) if path.is_file() else {}
    named = stated.get("tokenizer_class") or rewriting.config.get("tokenizer_class")
    has_tokenizer = path.is_file() or (folder / "tokenizer.json").is_file()
    if rewriting.special_tokens and has_tokenizer and str(named).startswith("GPT2Tokenizer"):
        write_json(path, stated | {key: "<|endoftext|>" for key in rewriting.special_tokens if key not in stated})
