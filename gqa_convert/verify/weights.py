"""Reads checkpoints with the safetensors library and torch, not with the reader that the converter uses."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open

from gqa_convert.verify.report import first_line

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PREFERENCE = (SINGLE, INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
"""The order in which transformers looks for weights."""
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_BLOCK = 256 << 10
"""Bytes of two files that are compared at a time: a core's cache holds them. Mapped files take up to twice as long."""
_READ = 1 << 30
"""Bytes that are read at a time: Linux reads at most 2 GiB."""


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it does not hold a JSON object.
    """
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"it holds a JSON {type(value).__name__}, not an object")  # noqa: TRY004 - all damage raises one class
    return value


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """The place of its first byte in a safetensors file."""

    @property
    def numbers(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Its size."""
        return int(self.numbers * self.dtype.itemsize)


class Weights:
    """The tensors of a checkpoint folder by name.

    Args:
        folder: the checkpoint's folder.
        error: makes the exception for something that cannot be read, from its description.
        result_dtypes: the types that OUT must have for tensors that a rewritten SOURCE holds in a wider one.
    """

    def __init__(
        self,
        folder: Path,
        error: Callable[[str], Exception],
        result_dtypes: Mapping[str, torch.dtype] = MappingProxyType({}),
    ) -> None:
        self.folder = folder
        self.result_dtypes = result_dtypes
        self.tensors: dict[str, Stored] = {}
        """Every tensor in the files, whatever the index says."""
        self.index: dict[str, Any] | None = None
        self.metadata: dict[str, dict[str, str]] = {}
        """By safetensors file."""
        self._error = error
        self._loaded: dict[str, torch.Tensor] = {}
        chosen = [name for name in PREFERENCE if (folder / name).is_file()]
        if not chosen:
            raise error(f"{folder} has no weights: it has none of {', '.join(PREFERENCE)}")
        self.chosen = chosen[0]
        self.files = [self.chosen]
        if self.chosen.endswith(".json"):
            self.index = self._read_index(folder / self.chosen)
            self.files = sorted(set(self.index["weight_map"].values()))
        for file in self.files:
            self._open(file)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors."""
        return {name: stored.shape for name, stored in self.tensors.items()}

    def _read_index(self, path: Path) -> dict[str, Any]:
        try:
            index = read_object(path)
            files = list(index["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError) as problem:
            raise self._error(f"{path} cannot be read ({first_line(problem)})") from None
        if not files or not all(isinstance(file, str) and file and Path(file).name == file for file in files):
            raise self._error(f"{path} does not map tensors to files of its folder")
        return index

    def _open(self, file: str) -> None:
        try:
            found = self._read_header(file) if file.endswith(".safetensors") else self._load(file)
        except Exception as problem:
            raise self._error(f"{self.folder / file} cannot be read ({first_line(problem)})") from None
        for name, stored in found.items():
            if name in self.tensors:
                raise self._error(f"{self.folder} holds tensor {name} twice, in {self.tensors[name].file} and {file}")
            self.tensors[name] = stored

    def _read_header(self, file: str) -> dict[str, Stored]:
        path = self.folder / file
        with safe_open(path, framework="pt") as opened:  # checks the file, and tells no offsets
            self.metadata[file] = opened.metadata() or {}
        with path.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        found = {}
        for name, entry in header.items():
            start = 8 + length + entry["data_offsets"][0]
            found[name] = Stored(file, _DTYPES[entry["dtype"]], tuple(entry["shape"]), start)
        return found

    def _load(self, file: str) -> dict[str, Stored]:
        path = self.folder / file
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # files from before torch 1.6 cannot be memory-mapped
            state = torch.load(path, map_location="cpu", weights_only=True)
        found = {}
        for name, tensor in state.items():
            if isinstance(tensor, torch.Tensor):
                self._loaded[name] = tensor
                found[name] = Stored(file, tensor.dtype, tuple(tensor.shape), 0)
        return found

    def result_dtype(self, name: str) -> torch.dtype:
        """The type of a tensor of SOURCE in OUT."""
        return self.result_dtypes.get(name, self.tensors[name].dtype)

    def open_at(self, name: str) -> FileIO:
        """The safetensors file that holds a tensor, at the tensor's first byte."""
        stored = self.tensors[name]
        file = FileIO(self.folder / stored.file)
        file.seek(stored.start)
        return file

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor."""
        if name in self._loaded:
            return self._loaded[name].contiguous()
        stored = self.tensors[name]
        buffer = torch.empty(stored.nbytes, dtype=torch.uint8)
        with self.open_at(name) as file:
            view = memoryview(buffer.numpy())
            for start in range(0, stored.nbytes, _READ):
                if not file.readinto(view[start : start + _READ]):
                    raise self._error(f"tensor {name} of {self.folder} cannot be read: the file ends in it")
        return buffer.view(stored.dtype).reshape(stored.shape)


def same_bytes(ours: Weights, theirs: Weights, name: str, progress: Callable[[int], None]) -> bool:
    """Whether both checkpoints hold the same bytes for a tensor of one shape, and of the type that OUT must have.

    Args:
        ours: OUT.
        theirs: SOURCE.
        name: of the tensor.
        progress: called with the number of bytes compared since the last call.
    """
    one, other = ours.tensors[name], theirs.tensors[name]
    if not other.file.endswith(".safetensors") or theirs.result_dtype(name) != other.dtype:
        progress(one.nbytes)
        return same_bits(ours.read(name), theirs.read(name).to(theirs.result_dtype(name)))
    left, right = bytearray(_BLOCK), bytearray(_BLOCK)
    with ours.open_at(name) as mine, theirs.open_at(name) as its:
        for at in range(0, one.nbytes, _BLOCK):
            count = min(_BLOCK, one.nbytes - at)
            read = mine.readinto(memoryview(left)[:count]), its.readinto(memoryview(right)[:count])
            if read != (count, count) or left != right:  # behind a last block both hold what was equal before
                return False
    progress(one.nbytes)
    return True


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same type, shape and bytes. NaN equals itself, and -0.0 differs from 0.0."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    flat = [tensor.contiguous().reshape(-1) for tensor in (a, b)]
    places = [flat[0].nbytes, *(each.storage_offset() * each.itemsize for each in flat)]
    word = torch.int64 if all(place % 8 == 0 for place in places) else torch.uint8  # torch compares word by word
    return bool(torch.equal(flat[0].view(word), flat[1].view(word)))
