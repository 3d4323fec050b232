"""The checks on the folder of OUT: one complete set of weights, and an index that agrees with it.

The lists of file names repeat the converter's on purpose: a name that the converter forgets must not pass here.
"""

import json
import os
from fnmatch import fnmatch
from pathlib import Path

from gqa_convert.verify.checkpoint_reader import INDEX, SINGLE, Weights
from gqa_convert.verify.files.links import leads_out
from gqa_convert.verify.json_values import same_json
from gqa_convert.verify.report import Failure, Finding

_WEIGHTS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.safetensors.index.*.json",
    "*.bin",
    "*.bin.index.json",
    "*.bin.index.*.json",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.ckpt.*",
    "*.h5",
    "*.msgpack",
    "*.gguf",
    "*.onnx",
    "*.onnx_data",
    "*.ot",
    "*.tflite",
    "*.distcp",
    "*.npz",
    "*.nemo",
    "*.mlmodel",
)
_FOREIGN_FOLDERS = ("original/", "onnx/", "coreml/", "openvino/", "metal/", "global_step")
"""Folders in which a checkpoint holds the same weights in another format."""
_LEFTOVERS = (".spilled-*", ".share-probe")
"""Files of a conversion that has not ended."""


def list_files(folder: Path) -> list[str]:
    """The paths of all files relative to the folder, except hidden files, Python's caches, and the
    files of folders to which links lead out of it.

    Files of an unfinished conversion are listed although they are hidden.
    """
    found = []
    for root, folders, names in os.walk(folder, followlinks=True):
        here = Path(root)
        if here.resolve() in [parent.resolve() for parent in here.parents if parent.is_relative_to(folder)]:
            folders.clear()  # a link to a folder around it
            continue
        visible = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        folders[:] = [name for name in visible if not leads_out(here / name, folder)]
        kept = [name for name in names if not name.startswith(".") or matches(name, _LEFTOVERS)]
        found += [(here / name).relative_to(folder).as_posix() for name in kept]
    return sorted(found)


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a file's name, without its folders, matches one of the patterns."""
    return any(fnmatch(name.rsplit("/", 1)[-1], pattern) for pattern in patterns)


def is_weights(name: str) -> bool:
    """Whether a relative path is that of weights in any format."""
    return matches(name, _WEIGHTS) or name.startswith(_FOREIGN_FOLDERS)


def module_folders(folder: Path) -> set[str]:
    """The subfolders that modules.json (sentence-transformers) names as parts of the model; their weights belong to it."""
    try:
        return {module["path"] for module in json.loads((folder / "modules.json").read_bytes())} - {""}
    except (OSError, ValueError, TypeError, KeyError):
        return set()


def check_files(out: Weights, source: Weights) -> Finding:
    """OUT holds one set of safetensors files that agrees with its index, and no other weights."""
    if not out.files[0].endswith(".safetensors"):
        raise Failure(f"the weights are in {out.chosen}, expected safetensors files")
    modules = module_folders(source.folder)
    for name in list_files(out.folder):
        if matches(name, _LEFTOVERS):
            raise Failure(f"{name} is left over from an unfinished conversion")
        known = name in out.files or name == out.chosen or name.rpartition("/")[0] in modules
        if is_weights(name) and not known:
            raise Failure(f"{name} lies beside the weights in {out.chosen}: software may load it instead")
    _check_weight_map(out)
    _check_formats(out, source)
    size = sum((out.folder / file).stat().st_size for file in out.files)
    return Finding(f"{len(out.files)} weight file(s), {size:,} bytes", {"files": len(out.files), "bytes": size})


def _check_weight_map(out: Weights) -> None:
    if out.index is None:
        return
    stated = out.index["weight_map"]
    wrong = sorted(name for name in stated.keys() | out.file_of.keys() if stated.get(name) != out.file_of.get(name))
    if wrong:
        places = f"in {stated.get(wrong[0])}, but the files have it in {out.file_of.get(wrong[0])}"
        raise Failure(f"{INDEX} has {wrong[0]} {places} ({len(wrong)} tensors differ)")


def _check_formats(out: Weights, source: Weights) -> None:
    """Every file states `format = pt`, unless SOURCE is a set of safetensors files of which some do not."""
    stated = all(file.endswith(".safetensors") and source.metadata(file).get("format") for file in source.files)
    if not stated and source.files[0].endswith(".safetensors"):
        return
    for file in out.files:
        if out.metadata(file).get("format") != "pt":
            raise Failure(f"{file} lacks the metadata format = pt, which earlier releases of transformers require")


def check_index(out: Weights, source: Weights) -> Finding:
    """The totals in the index are those of the tensors, and its other metadata is SOURCE's."""
    if out.index is None:
        return Finding(f"not needed beside a single {SINGLE}")
    metadata = out.index.get("metadata")
    totals = {"total_size": sum(map(out.nbytes, out.file_of)), "total_parameters": sum(map(out.numbers, out.file_of))}
    if not isinstance(metadata, dict):
        raise Failure(f"{INDEX} has no metadata, which transformers needs")
    for key, value in totals.items():
        if metadata.get(key) != value or isinstance(metadata.get(key), bool):
            raise Failure(f"{INDEX} states {key} = {metadata.get(key)!r}, the tensors have {value}")
    theirs = (source.index or {}).get("metadata") or {}
    for key in sorted((metadata.keys() | theirs.keys()) - totals.keys()):
        if not same_json(metadata.get(key), theirs.get(key)):
            raise Failure(f"{INDEX} has {key} = {metadata.get(key)!r}, SOURCE has {theirs.get(key)!r}")
    return Finding(", ".join(f"{key} {value:,}" for key, value in totals.items()), totals)
