"""Folders that hold something else than a whole checkpoint that transformers loads: adapters, and Git LFS pointers."""

from fnmatch import fnmatch
from typing import TYPE_CHECKING

from gqa_convert.errors import CorruptCheckpointError, UnsupportedFormatError

if TYPE_CHECKING:
    from gqa_convert.checkpoint.hub import CheckpointFiles

_ADAPTER = "adapter_config.json"
_LFS_POINTER = b"version https://git-lfs"
_POINTER_BYTES = 1024
"""Git LFS pointers are shorter than this."""
_READ = ["*.json", "model*.safetensors", "pytorch_model*.bin", "*.model", "*.spm", "*.tiktoken", "vocab*", "merges.txt"]
"""Files whose content a conversion or transformers reads."""


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
