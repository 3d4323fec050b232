"""Writes the files of a result: its weights, and what lies beside them.

Each tensor is copied, or computed in memory; every file is synced.
"""

import math
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import numpy as np
from safetensors import safe_open

from gqa_convert.checkpoint import formats
from gqa_convert.checkpoint.dtypes import STORED, rounded
from gqa_convert.checkpoint.headers import TensorEntry, build_header
from gqa_convert.checkpoint.provenance import PROVENANCE
from gqa_convert.checkpoint.source import CONFIG, Checkpoint
from gqa_convert.checkpoint.source_files import SourceFiles
from gqa_convert.errors import NoSpaceError
from gqa_convert.families import layouts
from gqa_convert.families.loading import read_object
from gqa_convert.merging.factorisation import Array
from gqa_convert.merging.methods import METHODS
from gqa_convert.merging.pooling import pool_groups
from gqa_convert.publishing.atomic_files import sync, write_json
from gqa_convert.publishing.copying import BLOCK, LARGE, WrittenFile
from gqa_convert.runtime.json_objects import JsonObject

from .plan import Plan, TensorChange

Progress = Callable[[int], None]
"""Called with every number of bytes written."""
_TOKENIZER_CONFIG = "tokenizer_config.json"


def check_room(what: str, needed: int, folder: Path) -> None:
    """Refuse to begin what a disk cannot hold.

    Args:
        what: the subject of the message.
        needed: bytes.
        folder: an existing hidden folder on the disk.

    Raises:
        NoSpaceError: the disk has less room.
    """
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise NoSpaceError(
            f"{what} needs {needed:,} bytes, and the disk of {folder.parent} has {free:,} free: "
            "make room, or name a folder on another disk"
        )


# Weights


def write_weights(
    plan: Plan, folder: Path, merged: Mapping[str, Path], progress: Progress
) -> dict[str, float]:
    """Write all weight files into an empty folder. One tensor at a time is in memory.

    Args:
        plan: what to write.
        folder: an empty folder.
        merged: by the names of tensors of layers that were merged as a whole, the safetensors file
            that holds each.
        progress: called with every number of bytes written.

    Returns:
        Of each tensor whose heads are merged here: |heads - merged head| / |heads|, over all its
        heads (Frobenius norms).

    Raises:
        NoSpaceError: the disk cannot hold the result.
        NonFiniteError: a tensor that is merged holds NaN or Inf.
        CorruptCheckpointError: a source file changed during the conversion.
    """
    check_room("the result", plan.disk_bytes, folder)  # again, where merging has taken hours
    errors: dict[str, float] = {}
    touched = plan.regrouped.keys() | merged.keys()
    with SourceFiles(plan.checkpoint) as sources:

        def computed(name: str) -> Array | None:
            if name in merged:
                with safe_open(merged[name], "np") as stored:
                    return np.asarray(stored.get_tensor(name))
            if name in plan.regrouped:
                return _regroup(plan.regrouped[name], sources, errors)
            return None

        for file in plan.files:
            path = folder / file.file
            if file.shard is not None and touched.isdisjoint(file.names):
                size = plan.checkpoint.stored.shards[file.shard].size
                with WrittenFile(path, size, progress) as out:
                    out.copy(sources[file.shard], 0, size)
            else:
                tensors = dict(plan.tensors(file))
                write_file(path, tensors, file.metadata, sources, progress, computed)
        sources.check_unchanged()
    return errors


def write_file(
    path: Path,
    tensors: Mapping[str, TensorEntry],
    metadata: Mapping[str, str],
    sources: SourceFiles,
    progress: Progress,
    computed: Callable[[str], Array | None] = lambda name: None,
) -> None:
    """Write a safetensors file.

    Args:
        path: which does not exist.
        tensors: the types and shapes of its tensors by name.
        metadata: of the file.
        sources: the files of the source, which hold the others.
        progress: called with every number of bytes written.
        computed: makes the array that takes the place of the source's tensor of a name; None for
            any other.
    """
    nbytes = sum(entry.nbytes for entry in tensors.values())
    alignment = (0, 8)
    if nbytes >= LARGE:
        # whole blocks can be copied where tensors begin at the same place of a block as in the
        # source
        located = sources.locate(next(iter(tensors)))
        alignment = (located[1].start % BLOCK if located else 0, BLOCK)
    header = build_header(tensors, {"format": "pt"} | dict(metadata), data_start_modulo=alignment)
    with WrittenFile(path, len(header) + nbytes, progress) as out:
        out.write(header)
        for name, entry in tensors.items():
            array = computed(name)
            if array is None:
                located = sources.locate(name)
                if located is not None and located[1].dtype == entry.dtype:
                    source, stored = located
                    out.copy(source, stored.start, stored.nbytes)
                    continue
                array = sources.read(name)
            out.write(rounded(array, name, entry.dtype).reshape(-1).view(np.uint8).data)


def _regroup(change: TensorChange, sources: SourceFiles, errors: dict[str, float]) -> Array:
    """The array of a changed tensor: heads of the source merged into groups, in which case its
    error is noted, or repeated.
    """
    array = np.concatenate([sources.read(name) for name in change.sources])
    rows = array.T if change.transposed else array
    heads = layouts.split(np.ascontiguousarray(rows), change.sections)
    kv_heads = change.kv_heads
    squared_error = squared_norm = 0.0
    for number, section in enumerate(change.sections):
        if not section.merged:
            continue
        if kv_heads > section.heads:
            heads[number] = heads[number].repeat(kv_heads // section.heads, axis=0)
            continue
        pooling = METHODS[change.method].pooling
        assert pooling is not None, f"{change.name} belongs to a layer that is not merged yet"
        dtype = STORED[change.entry.dtype]
        heads[number], error, norm = pool_groups(
            heads[number], kv_heads, pooling, dtype, change.name
        )
        squared_error += error
        squared_norm += norm
        errors[change.name] = math.sqrt(squared_error / squared_norm) if squared_norm else 0.0
    joined = layouts.join(heads, layouts.regrouped(change.sections, kv_heads))
    return np.ascontiguousarray(joined.T) if change.transposed else joined


# Sidecar files


def write_sidecar_files(plan: Plan, folder: Path) -> None:
    """Write the index, the config, the modelling file if one is needed, and a copy of every other
    file of the source, of which only the tokenizer's config may change.

    Args:
        plan: of a checkpoint on this machine.
        folder: where the result's weights are.
    """
    files = {file.file: file.names for file in plan.files}
    totals = {"total_size": plan.weight_bytes_after, "total_parameters": plan.parameters_after}
    write_index(folder, files, (plan.checkpoint.index_metadata or {}) | totals)
    copy_files(plan.checkpoint, folder)
    for file in plan.modeling.files if plan.modeling else ():
        _copy(file, folder / file.name)
    (folder / PROVENANCE).unlink(missing_ok=True)
    write_json(folder / CONFIG, plan.config)
    # transformers 5 writes a name that earlier versions do not know
    path = folder / _TOKENIZER_CONFIG
    stated = read_object(path)
    if stated.get("tokenizer_class") == "TokenizersBackend":
        write_json(path, stated | {"tokenizer_class": "PreTrainedTokenizerFast"})


def copy_files(checkpoint: Checkpoint, folder: Path) -> None:
    """Copy and sync the sidecar files of a checkpoint on this machine.

    A source in another form may need values in its tokenizer's config that the tokenizer's class
    used to imply.
    """
    for name in checkpoint.carried:
        _copy(checkpoint.local_folder / name, folder / name)
    path = folder / _TOKENIZER_CONFIG
    has_tokenizer = path.is_file() or (folder / "tokenizer.json").is_file()
    if has_tokenizer and checkpoint.tokenizer_defaults:
        stated = read_object(path)
        name = str(stated.get("tokenizer_class") or checkpoint.config["tokenizer_class"])
        if name.startswith("GPT2Tokenizer"):
            write_json(path, stated | dict(checkpoint.tokenizer_defaults) | stated)


def write_index(folder: Path, files: Mapping[str, Collection[str]], metadata: JsonObject) -> None:
    """Write the index of weight files, unless there is only the one that needs none.

    Args:
        folder: where it goes.
        files: the names of the tensors in each file.
        metadata: of the index.
    """
    if list(files) == [formats.SAFETENSORS_SINGLE]:
        return
    weight_map = {name: file for file, names in files.items() for name in names}
    index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / formats.SAFETENSORS_INDEX, index)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    sync(target)
