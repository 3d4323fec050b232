"""Read safetensors headers by the safetensors library, and write them byte for byte as it does.

A file consists of 8 bytes of header length (little-endian), the header (JSON) and the tensors'
bytes, which follow one another without gaps. The library reads whole files; here it is given a
header alone, as it comes from the Hub.
"""

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from safetensors import SafetensorError, safe_open

from gqa_convert.errors import CorruptCheckpointError

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""

LENGTH_BYTES = 8

ITEM_BYTES: Mapping[str, int] = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}
"""Bytes of a number, by the safetensors dtypes of tensors that can be merged."""


def bits_per_element(dtype: str) -> int:
    """The first number in the name of a safetensors dtype, such as BF16, F8_E4M3 or I64; 8 for
    BOOL.
    """
    return 8 if dtype == "BOOL" else int(re.findall("[0-9]+", dtype)[0])


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


def header_bytes(first_bytes: bytes, file_size: int) -> int:
    """How many bytes to read of a file for its length field and its header, as far as it may go.

    Args:
        first_bytes: the first 8 of the file.
        file_size: in bytes.
    """
    length = int.from_bytes(first_bytes, "little")
    return min(LENGTH_BYTES + min(length, MAX_HEADER_BYTES), file_size)


def parse_header(
    raw: bytes, file_size: int, where: str
) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Read a header by the safetensors library, so that a result holds what others see in the file.

    Args:
        raw: the length field and the header.
        file_size: size of the whole file in bytes.
        where: the name of the file in error messages.

    Returns:
        The tensors by name, in the order of their bytes in the file, and the metadata.

    Raises:
        CorruptCheckpointError: the header is malformed, or its tensors do not tile the rest of the
            file exactly.
    """
    tensors = {}
    start = len(raw)
    with os.fdopen(os.memfd_create("header"), "wb") as file:  # with a hole in place of the tensors
        file.write(raw)
        file.truncate(file_size)
        try:
            with safe_open(f"/proc/self/fd/{file.fileno()}", "np") as opened:
                metadata = opened.metadata() or {}
                for name in opened.offset_keys():
                    field = opened.get_slice(name)
                    tensors[name] = TensorEntry(field.get_dtype(), tuple(field.get_shape()), start)
                    start += tensors[name].nbytes
        except SafetensorError as problem:
            detail = str(problem).removeprefix("Error while deserializing header: ")
            raise CorruptCheckpointError(
                f"{where} is truncated, or has a damaged header ({detail}): "
                "download or copy the file again"
            ) from None
    # the library gives tensors without numbers in any order
    places = sorted((entry.start, entry.nbytes, name) for name, entry in tensors.items())
    return {name: tensors[name] for _, _, name in places}, metadata


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
