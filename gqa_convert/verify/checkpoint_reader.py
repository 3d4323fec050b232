"""Reads checkpoints with the safetensors library and torch, not with the reader that the converter uses."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PREFERENCE = (SINGLE, INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
"""The order in which transformers looks for weights."""


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


def first_line(problem: BaseException) -> str:
    """The first line of any library's exception, with its class."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    text = lines[0] if lines else repr(problem)
    return f"{type(problem).__name__}: {text}"[:400]


class ByteRange(NamedTuple):
    """Where a tensor's bytes lie."""

    path: Path
    start: int
    """The first byte's place in the file."""
    nbytes: int


class Weights:
    """The tensors of a checkpoint folder by name. Numbers are read on demand.

    Args:
        folder: the checkpoint's folder.
        error: makes the exception for something that cannot be read, from its description.
        result_dtypes: torch dtypes that OUT must have for tensors that a rewritten SOURCE holds in a wider one.
    """

    def __init__(
        self, folder: Path, error: Callable[[str], Exception], result_dtypes: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self.folder = folder
        self.result_dtypes = result_dtypes
        self._error = error
        self._open: dict[str, Any] = {}
        self._headers: dict[str, tuple[int, dict[str, Any]]] = {}
        self.file_of: dict[str, str] = {}
        """Tensor -> the file that holds it, whatever the index says."""
        self.index: dict[str, Any] | None = None
        chosen = next((name for name in PREFERENCE if (folder / name).is_file()), None)
        if chosen is None:
            raise error(f"{folder} has no weights: it has none of {', '.join(PREFERENCE)}")
        self.chosen = chosen
        self.files = [chosen]
        if chosen.endswith(".json"):
            self.index = self._read_index(folder / chosen)
            self.files = sorted(set(self.index["weight_map"].values()))
        for file in self.files:
            for name in self._names(file):
                if name in self.file_of:
                    raise error(f"{folder} holds tensor {name} twice, in {self.file_of[name]} and {file}")
                self.file_of[name] = file

    def _read_index(self, path: Path) -> dict[str, Any]:
        try:
            index = read_object(path)
            files = list(index["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError) as problem:
            raise self._error(f"{path} cannot be read ({first_line(problem)})") from None
        if not files or not all(isinstance(file, str) and file and Path(file).name == file for file in files):
            raise self._error(f"{path} does not map tensors to files of its folder")
        return index

    def _names(self, file: str) -> list[str]:
        path = self.folder / file
        try:
            if file.endswith(".safetensors"):
                from safetensors import safe_open

                self._open[file] = safe_open(path, framework="pt")
                return list(self._open[file].keys())
            self._open[file] = _torch_tensors(path)
            return list(self._open[file])
        except Exception as problem:
            raise self._error(f"{path} cannot be read ({first_line(problem)})") from None

    def metadata(self, file: str) -> dict[str, str]:
        """The metadata in a safetensors file's header; empty for a `.bin` file."""
        return (self._open[file].metadata() or {}) if file.endswith(".safetensors") else {}

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        handle = self._open[self.file_of[name]]
        return tuple(handle[name].shape if isinstance(handle, dict) else handle.get_slice(name).get_shape())

    def numbers(self, name: str) -> int:
        """How many numbers a tensor holds."""
        return math.prod(self.shape(name))

    def rows(self, name: str, start: int, stop: int, axis: int = 0) -> Any:
        """Rows `start` to `stop` of a tensor, or its columns with `axis` 1, as a contiguous torch tensor.

        A scalar counts as one row.
        """
        try:
            handle = self._open[self.file_of[name]]
            if isinstance(handle, dict):
                tensor = handle[name].reshape(1) if handle[name].dim() == 0 else handle[name]
                return (tensor[:, start:stop] if axis else tensor[start:stop]).contiguous()
            if not handle.get_slice(name).get_shape():
                return handle.get_tensor(name).reshape(1)[start:stop]
            tensor = handle.get_slice(name)
            return (tensor[:, start:stop] if axis else tensor[start:stop]).contiguous()
        except Exception as problem:
            raise self._error(f"tensor {name} of {self.folder} cannot be read ({first_line(problem)})") from None

    def whole(self, name: str) -> Any:
        """A whole tensor."""
        shape = self.shape(name)
        return self.rows(name, 0, shape[0] if shape else 1)

    def dtype(self, name: str) -> Any:
        """A tensor's torch dtype."""
        return self.rows(name, 0, 0).dtype

    def result_dtype(self, name: str) -> Any:
        """The torch dtype of a tensor of SOURCE in OUT."""
        return self.result_dtypes.get(name) or self.dtype(name)

    def nbytes(self, name: str) -> int:
        """A tensor's size in bytes."""
        return int(self.numbers(name) * self.dtype(name).itemsize)

    def byte_range(self, name: str) -> ByteRange | None:
        """Where a tensor's bytes lie in its safetensors file; None in a `.bin` file."""
        file = self.file_of[name]
        if not file.endswith(".safetensors"):
            return None
        path = self.folder / file
        if file not in self._headers:  # the library has checked it, and tells no offsets
            with path.open("rb") as opened:
                length = int.from_bytes(opened.read(8), "little")
                self._headers[file] = 8 + length, json.loads(opened.read(length))
        begin, header = self._headers[file]
        first, last = header[name]["data_offsets"]
        return ByteRange(path, begin + first, last - first)

    def blocks(self, name: str, limit: int) -> Iterator[tuple[int, int]]:
        """Ranges of rows (start, stop) of at most `limit` bytes each, but of at least one row."""
        shape = self.shape(name)
        count = shape[0] if shape else 1
        step = max(1, limit // max(1, self.nbytes(name) // max(1, count)))
        for start in range(0, count, step):
            yield start, min(start + step, count)


def _torch_tensors(path: Path) -> dict[str, Any]:
    import torch

    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:  # files from before torch 1.6 cannot be memory-mapped
        state = torch.load(path, map_location="cpu", weights_only=True)
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
