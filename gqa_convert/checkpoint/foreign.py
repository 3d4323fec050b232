"""Folders that hold something else than a whole checkpoint that transformers loads: what they hold, and what to do.

Adapters, training checkpoints, foreign formats, unfinished downloads and Git LFS pointers.
"""

import json
import shlex
from collections.abc import Iterable, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any, Final

from gqa_convert.errors import CorruptCheckpointError, SourceNotFoundError, UnsupportedFormatError

if TYPE_CHECKING:
    from gqa_convert.checkpoint.hub import CheckpointFiles

ADAPTER = "adapter_config.json"
_LFS_POINTER = b"version https://git-lfs"
_POINTER_BYTES = 1024
"""Git LFS pointers are shorter than this."""
_TOKENIZER = ("*.json", "*.model", "*.spm", "*.tiktoken", "vocab*", "merges.txt")
"""Sidecar files whose content a conversion or transformers reads."""

_LOADERS = {"CAUSAL_LM": "AutoPeftModelForCausalLM", "SEQ_2_SEQ_LM": "AutoPeftModelForSeq2SeqLM"}
"""peft's classes by the kind of task that an adapter states."""

_UNFINISHED = ("*.incomplete", "*.part", "*.crdownload", "*.aria2", "*.download")

_RUN: Final = "resolved_recipe.yaml"
"""A file in the folder of every run of uptrain."""

_FORMATS: Final[tuple[tuple[tuple[str, ...], str], ...]] = (
    (
        (ADAPTER, "adapter_model.*"),
        "an adapter, not a whole model: merge it into its base model first (merge_and_unload)",
    ),
    (
        ("*.distcp", ".metadata"),
        "a distributed training checkpoint: consolidate it first (torch.distributed.checkpoint.format_utils)",
    ),
    (
        ("global_step*/*", "zero_to_fp32.py"),
        "a DeepSpeed checkpoint: consolidate it first with its zero_to_fp32.py",
    ),
    (
        ("*.gguf",),
        "GGUF files and no other weights: convert the Hugging Face checkpoint that they were made from",
    ),
    (
        ("*.h5", "*.msgpack", "*.ckpt.index"),
        "only weights for TensorFlow or Flax, which transformers 5 cannot read: load it in transformers 4 with from_pretrained(..., from_tf=True) or from_flax=True, and save it with save_pretrained",
    ),
    (
        ("consolidated*.safetensors", "consolidated*.pth", "original/consolidated*"),
        "weights in the vendor's original layout: use the Hugging Face version",
    ),
    (
        (
            "*.onnx",
            "*.onnx_data",
            "openvino_model.*",
            "*.mlmodel",
            "*.mlpackage/*",
            "*.tflite",
            "*.nemo",
            "*.ot",
            "*.pte",
        ),
        "only a model exported for another program: convert the Hugging Face checkpoint that it was exported from",
    ),
)
"""Patterns of file names, and what a folder with such files and without others holds."""


def refuse_foreign_weights(names: Sequence[str], where: str, *, parts: Sequence[str] = ()) -> None:
    """Raise an error if a folder without weights holds checkpoints in subfolders, or files of another format.

    Args:
        names: paths relative to the folder, sorted.
        where: the folder in messages.
        parts: its subfolders that hold weights.

    Raises:
        UnsupportedFormatError: they are files of another format.
        SourceNotFoundError: the weights are in subfolders.
    """
    if _RUN in names:
        raise UnsupportedFormatError(
            f"{where} holds a run of gqa-convert uptrain: name its subfolder model/, which exists once the run is complete (found {_RUN})"
        )
    if parts:
        several = f"one of its {len(parts)} subfolders with weights, such as {parts[-1]}"
        one = f"its subfolder {parts[0]}, which does"
        raise SourceNotFoundError(f"{where} holds no weights itself: name {several if len(parts) > 1 else one}")
    for patterns, text in _FORMATS:
        anywhere = (*patterns, *(f"*/{pattern}" for pattern in patterns))
        for name in names:
            if any(fnmatch(name, pattern) for pattern in anywhere):
                raise UnsupportedFormatError(f"{where} holds {text} (found {name})")


def refuse_adapter(files: "CheckpointFiles", *, model: bool) -> None:
    """Raise UnsupportedFormatError if a folder holds an adapter, with its base model and how to merge it.

    Args:
        files: of the folder.
        model: whether it holds a whole model too.
    """
    if ADAPTER not in files.sizes:
        return
    stated: Any = None
    with suppress(ValueError):
        stated = json.loads(files.read(ADAPTER, 0, files.sizes[ADAPTER]))
    if not isinstance(stated, dict):
        stated = {}
    base = stated.get("base_model_name_or_path")
    of = f" of {base}" if base and isinstance(base, str) else ""
    if model:
        raise UnsupportedFormatError(
            f"{files.name} holds a model and an adapter{of} ({ADAPTER}), and transformers with peft loads the adapter's base model instead: "
            f"move {ADAPTER} and adapter_model.* to another folder, or merge the adapter first (merge_and_unload)"
        )
    loader = _LOADERS.get(str(stated.get("task_type")), "AutoPeftModel")
    call = f"from peft import {loader} as M; M.from_pretrained({files.name!r}).merge_and_unload().save_pretrained('MERGED')"
    raise UnsupportedFormatError(
        f"{files.name} holds an adapter{of}, not a whole model ({ADAPTER}): merge it with `{shlex.join(['python', '-c', call])}`, "
        "copy the base model's tokenizer beside it, and convert MERGED"
    )


def refuse_pointer(files: "CheckpointFiles", name: str) -> None:
    """Raise CorruptCheckpointError if a file is only Git LFS's pointer to its content."""
    size = files.sizes[name]
    if size < _POINTER_BYTES and files.read(name, 0, size).startswith(_LFS_POINTER):
        raise CorruptCheckpointError(
            f"{files.name}/{name} is only a Git LFS pointer to its content: fetch the files with `git lfs pull`, or download "
            "the repository with `hf download`"
        )


def refuse_pointers(files: "CheckpointFiles", names: Iterable[str]) -> None:
    """`refuse_pointer` for the files among the sidecar files that programs read."""
    for name in names:
        if any(fnmatch(name, pattern) for pattern in _TOKENIZER):
            refuse_pointer(files, name)


def unfinished_download(files: "CheckpointFiles") -> str:
    """A clause about a download into this folder that was interrupted, or "" without a trace of one."""
    found = [name for name in files.sizes if any(fnmatch(name, pattern) for pattern in _UNFINISHED)]
    if files.folder is not None:
        # where the Hub's client keeps what it has not finished: of a download to a folder, and in its cache
        beside = (files.folder / ".cache" / "huggingface", files.folder.absolute().parent.parent / "blobs")
        found += [path.name for folder in beside for path in sorted(folder.rglob("*.incomplete"))]
    if not found:
        return ""
    count = f"{len(found)} files" if len(found) > 1 else "a file"
    return f" a download was interrupted, which left {count} such as {found[0]}: repeat it (`hf download` resumes), and convert {files.name} then"
