"""The checks on the files of OUT: one complete set of weights, its index, the files taken over from SOURCE, and hashes.

The lists of file names, and the rule for links, repeat the converter's on purpose: a name that the converter forgets, or a
link that it follows by mistake, must not pass here.
"""

import filecmp
import hashlib
import json
import os
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from gqa_convert.families.family import Modeling
from gqa_convert.verify.config import compare_json, in_json
from gqa_convert.verify.report import Failure
from gqa_convert.verify.weights import CONFIG, INDEX, PROVENANCE, SINGLE, Weights, readable_object

_LEFTOVERS = (".spilled-*", ".share-probe")
"""Files of a conversion that has not ended."""
_WEIGHTS = (
    *("*.safetensors", "*.safetensors.index.json", "*.safetensors.index.*.json", *_LEFTOVERS),
    *("*.bin", "*.bin.index.json", "*.bin.index.*.json", "*.pt", "*.pth", "*.ckpt", "*.ckpt.*", "*.h5", "*.msgpack"),
    *("*.gguf", "*.onnx", "*.onnx_data", "*.ot", "*.tflite", "*.distcp", "*.npz", "*.nemo", "*.mlmodel"),
)
_FOREIGN_FOLDERS = ("original/", "onnx/", "coreml/", "openvino/", "metal/", "global_step")
"""Folders in which a checkpoint holds the same weights in another format."""
_PROSE = ("*.md", "README.md.old*", "LICENSE*", "NOTICE*", "*.png", "*.svg", "*.jpg", "*.pdf")
"""Files that no software reads. A model card may be rewritten after the conversion."""


def open_result(folder: Path, source: Weights) -> tuple[Weights, str]:
    """OUT's tensors: it holds one set of safetensors files that agrees with its index, and no other weights."""
    out = Weights(folder)
    if not out.files[0].endswith(".safetensors"):
        raise Failure(f"the weights are in {out.chosen}, expected safetensors files")
    modules = _module_folders(source.folder)
    for name in _list_files(out.folder):
        known = name in (*out.files, out.chosen) or name.rpartition("/")[0] in modules
        if _is_weights(name) and not known:
            raise Failure(
                f"{name} lies beside the weights in {out.chosen}: software may load it instead, or a conversion has not "
                "ended"
            )
    if out.index is not None:
        compare_json(INDEX, out.index["weight_map"], out.file_of)
    # a SOURCE of safetensors files of which some do not state their format may have been made without it
    formats = {metadata.get("format") for metadata in source.metadata.values()}
    for file in out.files:
        if None not in formats and out.metadata[file].get("format") != "pt":
            raise Failure(f"{file} lacks the metadata format = pt, which earlier releases of transformers require")
    size = sum((out.folder / file).stat().st_size for file in out.files)
    return out, f"{len(out.files)} weight file(s), {size:,} bytes"


def check_index(out: Weights, source: Weights) -> str:
    """The totals in the index are those of the tensors, and its other metadata is SOURCE's."""
    if out.index is None:
        return f"not needed beside a single {SINGLE}"
    expected = dict((source.index or {}).get("metadata") or {})
    expected["total_size"] = sum(tensor.nbytes for tensor in out.tensors.values())
    expected["total_parameters"] = sum(tensor.numel() for tensor in out.tensors.values())
    compare_json(INDEX, out.index["metadata"], expected)
    return f"{expected['total_size']:,} bytes of tensors"


def check_carried(out: Path, source: Path, modeling: Modeling | None) -> str:
    """OUT has every other file of SOURCE, byte for byte, and no new file that software reads.

    Links that lead out of SOURCE do not count as files of it.

    Args:
        out: OUT's folder.
        source: SOURCE's folder.
        modeling: whose files another check compares.
    """
    own = {CONFIG, PROVENANCE, *(file.name for file in (modeling.files if modeling else ()))}
    modules = _module_folders(source)

    def compared(folder: Path) -> list[str]:
        names = [name for name in _list_files(folder) if name not in own and not _matches(name, _PROSE)]
        return [name for name in names if not _is_weights(name) or name.rpartition("/")[0] in modules]

    theirs = [name for name in compared(source) if not _leads_out(source / name, source)]
    for name in theirs:
        if not (out / name).is_file():
            raise Failure(f"{name} of SOURCE is missing")
        if not filecmp.cmp(out / name, source / name, shallow=False) and not _is_renamed_tokenizer(
            out / name, source / name
        ):
            raise Failure(f"{name} differs from SOURCE's")
    extra = [name for name in compared(out) if name not in theirs]
    if extra:
        raise Failure(f"{extra[0]} is not in SOURCE ({len(extra)} extra files)")
    return f"{len(theirs)} file(s), byte for byte"


def check_hashes(out: Path, claims: dict[str, Any], *, required: bool) -> str:
    """OUT's weight files are those that were written.

    Args:
        out: OUT's folder.
        claims: OUT's provenance record.
        required: whether the conversion always records hashes, because no other check sees every bit.
    """
    if claims["result"] is None and not required:
        return "none were recorded; the checks on tensors compare every bit"
    files = claims["result"]["files"]
    for name, stated in files.items():
        if stated["sha256"] != (found := file_sha256(out / name)):
            raise Failure(
                f"{name} has SHA-256 {found}, expected {stated['sha256']}: it has changed since it was written"
            )
    unlisted = sorted({path.name for path in out.glob("*.safetensors")} - set(files))
    if unlisted:
        raise Failure(f"{PROVENANCE} has no hash of {unlisted[0]} ({len(unlisted)} weight files without one)")
    return f"{len(files)} weight file(s) as they were written"


def file_sha256(path: Path) -> str:
    """The hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _list_files(folder: Path) -> list[str]:
    """The paths of all files relative to the folder, except hidden files, Python's caches, and the files of folders to
    which links lead out of it. Files of an unfinished conversion are listed although they are hidden.
    """
    found = []
    for root, folders, names in os.walk(folder, followlinks=True):
        here = Path(root)
        folders[:] = [
            name
            for name in folders
            if not (name.startswith(".") or name == "__pycache__" or _leads_out(here / name, folder))
            and not here.resolve().is_relative_to((here / name).resolve())  # a link to a folder around it
        ]
        kept = [name for name in names if not name.startswith(".") or _matches(name, _LEFTOVERS)]
        found += [(here / name).relative_to(folder).as_posix() for name in kept]
    return sorted(found)


def _leads_out(path: Path, folder: Path) -> bool:
    """Whether a path is a link to anything but a visible file of its folder, or a blob of the same repository in the
    Hub's cache.
    """
    if not path.is_symlink():
        return False
    target, home = path.resolve(), folder.resolve()
    if target.is_relative_to(home):
        return any(part.startswith(".") for part in target.relative_to(home).parts)
    caches = [parent.parent for parent in home.parents if parent.name == "snapshots"]
    return target.parent not in [(cache / "blobs").resolve() for cache in caches]


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a file's name, without its folders, matches one of the patterns."""
    return any(fnmatch(name.rsplit("/", 1)[-1], pattern) for pattern in patterns)


def _is_weights(name: str) -> bool:
    return _matches(name, _WEIGHTS) or name.startswith(_FOREIGN_FOLDERS)


def _module_folders(folder: Path) -> set[str]:
    """The subfolders that modules.json (sentence-transformers) names as parts of the model; their weights belong to it."""
    try:
        return {module["path"] for module in json.loads((folder / "modules.json").read_bytes())} - {""}
    except (OSError, ValueError, TypeError, KeyError):
        return set()


def _is_renamed_tokenizer(ours: Path, theirs: Path) -> bool:
    """Whether a tokenizer_config.json differs only in the class, for which earlier releases of transformers have another
    name.
    """
    if ours.name != "tokenizer_config.json":
        return False
    original = readable_object(theirs)
    renamed = original | {"tokenizer_class": "PreTrainedTokenizerFast"}
    return original.get("tokenizer_class") == "TokenizersBackend" and in_json(readable_object(ours)) == in_json(renamed)
