"""Read safetensors headers with strict checks, and write them byte for byte as the safetensors library does.

A file consists of 8 bytes of header length (little-endian), the header (JSON) and the tensors' bytes. The reader trusts
nothing, because the converter copies the byte ranges that a header names.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any

from gqa_convert.checkpoint.strict_json import parse_object
from gqa_convert.errors import CorruptCheckpointError

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""

LENGTH_BYTES = 8

_LARGEST = (1 << 64) - 1
_KEYS = {"dtype", "shape", "data_offsets"}

DTYPE_BITS: Mapping[str, int] = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
"""Bits per element by safetensors dtype."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The dtype, the shape and the byte range, counted from the start of the file, of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header; `tensors` is in the order of their bytes in the file."""

    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]
    data_start: int


def header_length(first_bytes: bytes, file_size: int, where: str) -> int:
    """Return the length in bytes of the JSON header, read from the first 8 bytes of a file.

    Raises:
        CorruptCheckpointError: the file is shorter than the stated length, or the length exceeds the format's limit.
    """
    if len(first_bytes) < LENGTH_BYTES:
        raise CorruptCheckpointError(
            f"{where} has {file_size} bytes, too few for a safetensors file: download or copy it again"
        )
    length = int.from_bytes(first_bytes[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise CorruptCheckpointError(
            f"{where} states a header of {length:,} bytes, over the format's limit of {MAX_HEADER_BYTES:,}: "
            "the file is damaged or not a safetensors file, download or copy it again"
        )
    if LENGTH_BYTES + length > file_size:
        raise CorruptCheckpointError(
            f"{where} is truncated: the header alone needs {LENGTH_BYTES + length:,} bytes and the file has {file_size:,}; "
            "download or copy it again"
        )
    return length


def parse_header(raw: bytes, file_size: int, where: str) -> Header:
    """Parse and check a JSON header, without its 8 length bytes.

    Args:
        raw: the bytes of the header.
        file_size: size of the whole file in bytes.
        where: the name of the file in error messages.

    Raises:
        CorruptCheckpointError: the header is malformed, or its tensors do not tile the rest of the file exactly.
    """
    if not raw.startswith(b"{"):
        raise _damaged(where, "it does not begin with '{'")
    fields = parse_object(raw, f"the header of {where}", parse_int=_natural)
    metadata = fields.pop("__metadata__", None)
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _damaged(where, "its __metadata__ is not a map of strings")
    try:
        "".join([*fields, *metadata, *metadata.values()]).encode("utf-8")
    except UnicodeEncodeError:
        raise _damaged(where, "a name holds half a surrogate pair") from None
    data_start = LENGTH_BYTES + len(raw)
    tensors = {name: _entry(name, field, data_start, where) for name, field in fields.items()}
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].nbytes)))
    end = data_start
    for name, entry in ordered.items():
        if entry.start != end:
            kind = "overlaps the tensor before it" if entry.start < end else "leaves a hole before it"
            raise _damaged(where, f"tensor {name!r} {kind}")
        end += entry.nbytes
    if end > file_size:
        raise CorruptCheckpointError(
            f"{where} is truncated: its tensors end at byte {end:,} and the file has {file_size:,} bytes; download or copy it again"
        )
    if end < file_size:
        raise _damaged(where, f"{file_size - end:,} bytes after the last tensor belong to no tensor")
    return Header(ordered, metadata, data_start)


def _damaged(where: str, problem: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{where} has a damaged header ({problem}): download or copy the file again")


def _entry(name: str, field: Any, data_start: int, where: str) -> TensorEntry:
    """Check a tensor's field of the header."""
    tensor = f"tensor {name!r}"
    if not isinstance(field, dict) or field.keys() != _KEYS:
        raise _damaged(where, f"{tensor} does not have exactly the keys dtype, shape and data_offsets")
    dtype, shape, offsets = field["dtype"], field["shape"], field["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise _damaged(where, f"{tensor} has the unknown type {dtype!r}")
    bits = DTYPE_BITS[dtype]
    # also refuses [2**62, 2**62, 0], as the safetensors library does
    if not _are_counts(shape) or len(shape) > 64 or max(accumulate(shape, mul, initial=bits)) > _LARGEST:
        raise _damaged(where, f"{tensor} has an impossible shape")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _damaged(where, f"{tensor} has impossible offsets")
    nbytes = offsets[1] - offsets[0]
    if bits * math.prod(shape) != 8 * nbytes:
        problem = f"of shape {shape} and type {dtype} does not fit its byte range of {nbytes} bytes"
        raise _damaged(where, f"{tensor} {problem}")
    return TensorEntry(dtype, tuple(shape), data_start + offsets[0], nbytes)


def _natural(digits: str) -> int:
    if digits.startswith("-") or len(digits) > 20:
        raise ValueError(f"{digits[:24]} is not a count")
    return int(digits)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item <= _LARGEST for item in value)


def build_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...], int]],
    metadata: Mapping[str, str],
    *,
    data_start_modulo: tuple[int, int] = (0, 8),
) -> bytes:
    """Return the 8 length bytes and the header of a new file whose tensors follow one another without gaps.

    Args:
        tensors: name, dtype, shape and size in bytes of each tensor, in file order.
        metadata: the `__metadata__` map; omitted if empty.
        data_start_modulo: (remainder, modulus) that the offset of the first data byte must satisfy. The header is
            padded with spaces until it does. To share blocks, a filesystem needs the remainder of the source modulo
            its block size.
    """
    fields: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, dtype, shape, nbytes in tensors:
        fields[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    raw = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    remainder, modulus = data_start_modulo
    raw += b" " * ((remainder - LENGTH_BYTES - len(raw)) % modulus)
    return len(raw).to_bytes(LENGTH_BYTES, "little") + raw
