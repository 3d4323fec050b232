"""Read safetensors headers by the safetensors library, and write them byte for byte as it does.

A file consists of 8 bytes of header length (little-endian), the header (JSON) and the tensors'
bytes, which follow one another without gaps.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from gqa_convert.errors import CorruptCheckpointError

LENGTH_BYTES = 8

ITEM_BYTES: Mapping[str, int] = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}
"""Bytes of a number, by the safetensors dtypes of tensors that can be merged."""


def bits_per_element(dtype: str) -> int:
    """The first number in the name of a safetensors dtype, such as BF16, F8_E4M3 or I64; 8 for
    BOOL.
    """
    number = re.search("[0-9]+", dtype)
    return int(number[0]) if number else 8


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The dtype and the shape of a tensor, and where it begins, counted from the start of the file,
    if it has a place in one yet.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int = 0

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * bits_per_element(self.dtype) // 8


Entries = dict[str, TensorEntry]
"""Tensors by name."""

Header = tuple[Entries, dict[str, str]]
"""The tensors of a file, in the order of their bytes, and its metadata."""


def read_header(path: Path) -> Header:
    """Read the header of a file by the safetensors library, so that a result holds what others see
    in the file.

    Raises:
        CorruptCheckpointError: the header is malformed, or its tensors do not tile the rest of the
            file exactly.
    """
    tensors = {}
    with path.open("rb") as file:
        start = LENGTH_BYTES + int.from_bytes(file.read(LENGTH_BYTES), "little")
    try:
        with safe_open(path, "np") as opened:
            metadata = opened.metadata() or {}
            for name in opened.offset_keys():
                field = opened.get_slice(name)
                tensors[name] = TensorEntry(field.get_dtype(), tuple(field.get_shape()), start)
                start += tensors[name].nbytes
    except SafetensorError as problem:
        raise damaged(str(path), problem) from None
    # the library gives tensors without numbers in any order
    places = sorted((entry.start, entry.nbytes, name) for name, entry in tensors.items())
    return {name: tensors[name] for _, _, name in places}, metadata


def damaged(where: str, problem: Exception) -> CorruptCheckpointError:
    """The error for a file whose header a library refuses."""
    detail = str(problem).removeprefix("Error while deserializing header: ")
    return CorruptCheckpointError(
        f"{where} is truncated, or has a damaged header ({detail}): download or copy the file again"
    )


def build_header(
    tensors: Mapping[str, TensorEntry],
    metadata: Mapping[str, str],
    *,
    data_start_modulo: tuple[int, int] = (0, 8),
) -> bytes:
    """Return the 8 length bytes and the header of a new file whose tensors follow one another
    without gaps.

    Args:
        tensors: by name, in file order; wherever they lie in another file.
        metadata: the `__metadata__` map; omitted if empty.
        data_start_modulo: (remainder, modulus) that the offset of the first data byte must satisfy.
            The header is padded with spaces until it does. To share blocks, a filesystem needs the
            remainder of the source modulo its block size.
    """
    fields: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, entry in tensors.items():
        end = offset + entry.nbytes
        fields[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    remainder, modulus = data_start_modulo
    raw += b" " * ((remainder - LENGTH_BYTES - len(raw)) % modulus)
    return len(raw).to_bytes(LENGTH_BYTES, "little") + raw
