"""Read `pytorch_model.bin` files as byte ranges.

torch stores the bytes of a tensor uncompressed in a zip file, so that they can be copied like those of a safetensors
file once their offsets are known. `torch.load` under FakeTensorMode yields the offsets without reading a weight, and
`weights_only=True` prevents a pickle from running code. Files without usable offsets (the format before torch 1.6,
transposed tensors) are spilled: written out as plain bytes.
"""

import sys
import zipfile
from itertools import accumulate
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint.headers import Header, TensorEntry
from gqa_convert.errors import CorruptCheckpointError, UnsupportedFormatError

_NAMES = {
    "torch.float64": "F64",
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.int16": "I16",
    "torch.int8": "I8",
    "torch.uint8": "U8",
    "torch.bool": "BOOL",
    "torch.complex64": "C64",
    "torch.uint16": "U16",
    "torch.uint32": "U32",
    "torch.uint64": "U64",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e5m2": "F8_E5M2",
}
"""The safetensors name of each dtype."""


def _load(path: Path, **options: Any) -> dict[str, Any]:
    """The tensors of a file by name."""
    import torch

    try:
        state = torch.load(path, map_location="cpu", weights_only=True, **options)
    except Exception as problem:  # torch raises its own, pickle's, zip's and OSError alike
        lines = [line.strip() for line in str(problem).splitlines() if line.strip()] or [repr(problem)]
        telling = [line for line in lines if "Unsupported" in line or "GLOBAL" in line]
        raise CorruptCheckpointError(
            f"{path} cannot be read as plain tensors ({(telling or lines)[0][:160]}): the file is damaged or holds code, which is never run"
        ) from None
    if not isinstance(state, dict):
        raise UnsupportedFormatError(
            f"{path} holds a {type(state).__name__} instead of a map of tensors: save model.state_dict()"
        )
    for name, tensor in state.items():
        found = type(tensor).__name__
        if isinstance(tensor, torch.Tensor):
            found = (
                ""
                if tensor.layout is torch.strided and str(tensor.dtype) in _NAMES
                else f"{tensor.dtype}, {tensor.layout}"
            )
        if found or not isinstance(name, str) or not name.isprintable() or name == "__metadata__":
            raise UnsupportedFormatError(
                f"{path} holds {name!r} ({found or 'a tensor'}), and only named, dense tensors of usual types can be read: save "
                "model.state_dict() of the unquantised model"
            )
    return state


def read_torch_header(path: Path) -> tuple[Header, bool]:
    """Return the tensors of a `.bin` file, and whether it must be spilled.

    If it must be, the offsets are those in the file that `spill` writes, not those in `path`.

    Raises:
        CorruptCheckpointError: the file is damaged or holds more than tensors.
        UnsupportedFormatError: the file holds something other than a map of names to tensors.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    _refuse_unusual_zip(path)
    with FakeTensorMode():
        state = _load(path)
    starts = [_offset(tensor) for tensor in state.values()]
    spilled = None in starts
    if spilled:
        starts = list(accumulate((tensor.nbytes for tensor in state.values()), initial=0))
    size = path.stat().st_size
    entries = {}
    for (name, tensor), start in zip(state.items(), starts, strict=False):
        assert start is not None
        if not spilled and start + tensor.nbytes > size:
            raise CorruptCheckpointError(
                f"{path} is truncated: tensor {name!r} extends past the end of the file; download or copy it again"
            )
        entries[name] = TensorEntry(_NAMES[str(tensor.dtype)], tuple(tensor.shape), start, tensor.nbytes)
    return Header(dict(sorted(entries.items(), key=lambda item: item[1].start)), {}, 0), spilled


def _offset(tensor: Any) -> int | None:
    """Where a tensor's bytes lie in its file; None if they are not there, or not in the order of its elements."""
    storage = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    if storage is None or not tensor.is_contiguous():
        return None
    return int(storage + tensor.storage_offset() * tensor.element_size())


def _refuse_unusual_zip(path: Path) -> None:
    """Raise UnsupportedFormatError if the zip file does not hold the tensors' bytes as they would lie in memory."""
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
            orders = [archive.read(record) for record in records if record.filename.endswith("/byteorder")]
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError):
        # the older format or a damaged file, which torch.load tells apart; of a compression that it does not know, zipfile
        # says NotImplementedError
        return
    if any(order != sys.byteorder.encode() for order in orders) or any(each.compress_type for each in records):
        raise UnsupportedFormatError(
            f"{path} is compressed or has another machine's byte order: load it with torch.load and save it again with torch.save"
        )


def spill(path: Path, destination: Path) -> None:
    """Write the tensors of a `.bin` file one after another, at the offsets that `read_torch_header` returned."""
    import torch

    with destination.open("wb") as file:  # over what a killed run may have left
        for tensor in _load(path, mmap=zipfile.is_zipfile(path)).values():
            file.write(memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()))
