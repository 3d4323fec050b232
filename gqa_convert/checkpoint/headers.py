"""Read safetensors headers with strict checks, and write them byte for byte as the safetensors library does.

A file consists of 8 bytes of header length (little-endian), the header (JSON) and the tensors' bytes. The reader trusts
nothing, because the converter copies the byte ranges that a header names.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import mul
from typing import Any, NamedTuple

from gqa_convert.checkpoint.strict_json import JsonObject, parse_object
from gqa_convert.errors import CorruptCheckpointError

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""

LENGTH_BYTES = 8

_LARGEST = (1 << 64) - 1

DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
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
        count = 1
        for size in self.shape:
            count *= size
        return count


class JoinedTensors(Mapping[str, TensorEntry]):
    """The tensors of several headers, which have no name in common, by name.

    Args:
        headers: the tensors of each.
    """

    def __init__(self, headers: Iterable[Mapping[str, TensorEntry]]) -> None:
        self._headers = tuple(headers)

    def __getitem__(self, name: str) -> TensorEntry:
        for tensors in self._headers:
            if name in tensors:
                return tensors[name]
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return chain.from_iterable(self._headers)

    def __len__(self) -> int:
        return sum(map(len, self._headers))


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


def parse_header(raw: bytes, file_size: int, where: str, names: Iterable[str] = ()) -> Header:
    """Parse and check a JSON header, without its 8 length bytes.

    Args:
        raw: the bytes of the header.
        file_size: size of the whole file in bytes.
        where: the name of the file in error messages.
        names: of tensors that the file may hold. The header refers to these objects instead of making its own.

    Raises:
        CorruptCheckpointError: the header is malformed, or its tensors do not tile the rest of the file exactly.
    """

    def corrupt(problem: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{where} has a damaged header ({problem}): download or copy the file again")

    if not raw.startswith(b"{"):
        raise corrupt("it does not begin with '{'")
    fields = parse_object(raw, f"the header of {where}", parse_int=_natural, convert=_compactor())
    metadata = fields.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise corrupt("its __metadata__ is not a map of strings")
    data_start = LENGTH_BYTES + len(raw)
    held = {name: name for name in names}
    tensors = {held.get(name, name): _entry(name, field, data_start, corrupt) for name, field in fields.items()}
    del fields, held
    try:
        "".join([*tensors, *metadata, *metadata.values()]).encode("utf-8")
    except UnicodeEncodeError:
        raise corrupt("a name holds half a surrogate pair") from None
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].nbytes)))
    expected = data_start
    for name, entry in ordered.items():
        if entry.start != expected:
            kind = "overlaps the tensor before it" if entry.start < expected else "leaves a hole before it"
            raise corrupt(f"tensor {name!r} {kind}")
        expected = entry.start + entry.nbytes
    if expected > file_size:
        raise CorruptCheckpointError(
            f"{where} is truncated: its tensors end at byte {expected:,} and the file has {file_size:,} bytes; download or copy it again"
        )
    if expected < file_size:
        raise corrupt(f"{file_size - expected:,} bytes after the last tensor belong to no tensor")
    return Header(ordered, metadata, data_start)


class _Field(NamedTuple):
    """A tensor's field of the header, whose types have been checked."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int


_KEYS = {"dtype", "shape", "data_offsets"}


def _compactor() -> Callable[[JsonObject], Any]:
    """Return a function that makes a `_Field` of an object that is one, and returns any other object.

    Experts have the same types, shapes and sizes: there is one object of each for tens of thousands of fields.
    """
    known: dict[Any, Any] = {dtype: dtype for dtype in DTYPE_BITS}

    def compact(found: JsonObject) -> Any:
        if _problem(found) is not None:
            return found
        shape, (begin, end) = tuple(found["shape"]), found["data_offsets"]
        nbytes = end - begin
        return _Field(known[found["dtype"]], known.setdefault(shape, shape), begin, known.setdefault(nbytes, nbytes))

    return compact


def _problem(field: Any) -> str | None:
    """What is wrong with the types of a tensor's field, or None."""
    if not isinstance(field, dict) or field.keys() != _KEYS:
        return "does not have exactly the keys dtype, shape and data_offsets"
    dtype, shape, offsets = field["dtype"], field["shape"], field["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        return f"has the unknown type {dtype!r}"
    if not _naturals(shape) or len(shape) > 64:
        return "has an impossible shape"
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return "has impossible offsets"
    return None


def _entry(name: str, field: Any, data_start: int, corrupt: Callable[[str], CorruptCheckpointError]) -> TensorEntry:
    """Check a tensor's field."""
    if not isinstance(field, _Field):
        raise corrupt(f"tensor {name!r} {_problem(field)}")
    dtype, shape, begin, nbytes = field
    entry = TensorEntry(dtype, shape, data_start + begin, nbytes)
    # also refuses [2**62, 2**62, 0], as the safetensors library does
    if max(accumulate(shape, mul, initial=DTYPE_BITS[dtype])) > _LARGEST:
        raise corrupt(f"tensor {name!r} has an impossible shape")
    if entry.elements * DTYPE_BITS[dtype] != nbytes * 8:
        raise corrupt(
            f"tensor {name!r} of shape {list(shape)} and type {dtype} does not fit its byte range of {nbytes} bytes"
        )
    return entry


def _natural(digits: str) -> int:
    if digits.startswith("-") or len(digits) > 20:
        raise ValueError(f"{digits[:24]} is not a count")
    return int(digits)


def _naturals(value: Any) -> bool:
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
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    raw = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    remainder, modulus = data_start_modulo
    raw += b" " * ((remainder - LENGTH_BYTES - len(raw)) % modulus)
    return len(raw).to_bytes(LENGTH_BYTES, "little") + raw
