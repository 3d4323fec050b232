"""Read `pytorch_model.bin` files, whose tensors torch maps into memory or, in the format before
torch 1.6, loads.

`torch.load` under FakeTensorMode yields their types and shapes without reading a weight, and
`weights_only=True` prevents a pickle from running code.
"""

import zipfile
from pathlib import Path
from typing import Any

from gqa_convert.errors import CorruptCheckpointError, UnsupportedFormatError

from .dtypes import TORCH
from .headers import Entries, TensorEntry


def load_tensors(path: Path) -> dict[str, Any]:
    """The tensors of a `.bin` file by name.

    Raises:
        CorruptCheckpointError: the file is damaged or holds more than tensors.
        UnsupportedFormatError: the file holds something other than a map of names to tensors.
    """
    import torch

    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=_can_be_mapped(path))
    except Exception as problem:  # torch raises its own, pickle's, zip's and OSError alike
        raise CorruptCheckpointError(
            f"{path} cannot be read as plain tensors ({type(problem).__name__}): "
            "the file is damaged or holds code, which is never run"
        ) from None
    if not isinstance(state, dict):
        raise UnsupportedFormatError(
            f"{path} holds a {type(state).__name__}, no map of tensors: save model.state_dict()"
        )
    # what a safetensors file can hold
    for name, tensor in state.items():
        is_named = isinstance(name, str) and name.isprintable() and name != "__metadata__"
        is_tensor = isinstance(tensor, torch.Tensor)
        is_dense = is_tensor and tensor.layout is torch.strided and str(tensor.dtype) in TORCH
        if not (is_named and is_dense):
            found = f"{tensor.dtype}, {tensor.layout}" if is_tensor else type(tensor).__name__
            raise UnsupportedFormatError(
                f"{path} holds {name!r} ({found}), and only named, "
                "dense tensors of usual types can be read: save "
                "model.state_dict() of the unquantised model"
            )
    return state


def _can_be_mapped(path: Path) -> bool:
    """Whether the tensors' bytes lie in the file as in memory: not in the older format, nor
    compressed.
    """
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return not any(record.compress_type for record in archive.infolist())


def describe_tensors(path: Path) -> Entries:
    """The types and shapes of a `.bin` file's tensors; raises as `load_tensors` does."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        state = load_tensors(path)
    return {
        name: TensorEntry(TORCH[str(tensor.dtype)], tuple(tensor.shape))
        for name, tensor in state.items()
    }


def bytes_of(tensor: Any) -> Any:
    """A copy of a torch tensor's bytes in the order of its elements, as an array."""
    import torch

    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    return copy.reshape(-1).view(torch.uint8).numpy()
