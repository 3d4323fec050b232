"""Tensors in files that the process maps, for what would take too much memory."""

import os
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any


def mapped(tensor: Any, folder: Path) -> Any:
    """A copy of a torch tensor in a mapped file without a name, which lives as long as the copy.

    Args:
        tensor: on the CPU.
        folder: an existing one, on the filesystem that holds the file.

    Raises:
        OSError: the disk is full. The space is reserved immediately, because running out of it through a mapping would
            kill the process.
    """
    import torch

    with NamedTemporaryFile(dir=folder, prefix="waiting-") as file:
        os.posix_fallocate(file.fileno(), 0, tensor.nbytes)
        bytes_of = torch.from_file(file.name, shared=True, size=tensor.nbytes, dtype=torch.uint8)
    return bytes_of.view(tensor.dtype).reshape(tensor.shape).copy_(tensor)
