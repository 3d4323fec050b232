"""Folders that hold something else than a whole checkpoint that transformers loads: what they hold, and what to do.

Adapters, training checkpoints, foreign formats and Git LFS pointers.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Final

from gqa_convert.errors import CorruptCheckpointError, SourceNotFoundError, UnsupportedFormatError

if TYPE_CHECKING:
    from gqa_convert.checkpoint.hub import CheckpointFiles

_ADAPTER = "adapter_config.json"
_LFS_POINTER = b"version https://git-lfs"
_POINTER_BYTES = 1024
"""Git LFS pointers are shorter than this."""
_READ = ["*.json", "model*.safetensors", "pytorch_model*.bin", "*.model", "*.spm", "*.tiktoken", "vocab*", "merges.txt"]
"""Files whose content a conversion or transformers reads."""
_RUN: Final = "resolved_recipe.yaml"
"""A file in the folder of every run of uptrain."""
_OTHER_PROGRAMS = (
    "*.gguf *.h5 *.msgpack *.ckpt.index consolidated* *.onnx* openvino_model.* *.ml* *.tflite *.nemo *.ot *.pte"
)
_HOLDS: Final[Mapping[str, Sequence[str]]] = {
    "an adapter, not a whole model: merge it into its base model first (merge_and_unload)": ["adapter_*"],
    "a training checkpoint in parts: consolidate it first (torch.distributed.checkpoint.format_utils, or DeepSpeed's zero_to_fp32.py)": [
        *("*.distcp", ".metadata", "global_step*/*", "zero_to_fp32.py")
    ],
    "only weights for other programs: convert the Hugging Face checkpoint that they were made from": _OTHER_PROGRAMS.split(),
}
"""What a folder with files of these patterns and without others holds."""


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
        raise SourceNotFoundError(
            f"{where} holds no weights itself: name a subfolder with weights, such as {parts[-1]} ({len(parts)} found)"
        )
    for text, patterns in _HOLDS.items():
        for name in names:
            if any(fnmatch(name, pattern) or fnmatch(name, f"*/{pattern}") for pattern in patterns):
                raise UnsupportedFormatError(f"{where} holds {text} (found {name})")


def refuse_adapter(files: "CheckpointFiles") -> None:
    """Raise UnsupportedFormatError if a folder holds an adapter. Beside a whole model, transformers with peft would load
    the adapter's base model instead.
    """
    if _ADAPTER not in files.sizes:
        return
    raise UnsupportedFormatError(
        f"{files.name} holds an adapter ({_ADAPTER}): merge it into its base model (peft's merge_and_unload), save that with its tokenizer, "
        "and convert it; or, to convert a model without it, move adapter_* to another folder"
    )


def refuse_pointers(files: "CheckpointFiles") -> None:
    """Raise CorruptCheckpointError if a file that programs read is only Git LFS's pointer to its content."""
    for name, size in files.sizes.items():
        is_read = "/" not in name and any(fnmatch(name, pattern) for pattern in _READ)
        if is_read and size < _POINTER_BYTES and files.read(name, 0, size).startswith(_LFS_POINTER):
            raise CorruptCheckpointError(
                f"{files.name}/{name} is only a Git LFS pointer to its content: fetch the files with `git lfs pull`, or download "
                "the repository with `hf download`"
            )
