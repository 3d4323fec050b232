"""Reads checkpoints with the safetensors library and torch, not with the reader that the converter uses."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from gqa_convert.verify.report import first_line

CONFIG = "config.json"
PROVENANCE = "gqa_conversion.json"
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


def readable_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of OUT; empty if it cannot be read, so that what it should hold is found missing."""
    try:
        return read_object(path)
    except (OSError, ValueError):
        return {}


class Weights:
    """The tensors of a checkpoint folder, mapped into memory: reading one reads the file.

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
        self.tensors: dict[str, Tensor] = {}
        """Every tensor in the files, whatever the index says."""
        self.file_of: dict[str, str] = {}
        """By tensor."""
        self.index: dict[str, Any] | None = None
        self.metadata: dict[str, dict[str, str]] = {}
        """By safetensors file."""
        self._error = error
        chosen = [name for name in PREFERENCE if (folder / name).is_file()]
        if not chosen:
            raise error(f"{folder} has no weights: it has none of {', '.join(PREFERENCE)}")
        self.chosen = chosen[0]
        self.files = [self.chosen]
        if self.chosen.endswith(".json"):
            self.index = self._read_index(folder / self.chosen)
            self.files = sorted(set(self.index["weight_map"].values()))
        for file in self.files:
            try:
                found = self._map_file(file)
            except Exception as problem:
                raise error(f"{folder / file} cannot be read ({first_line(problem)})") from None
            for name in found.keys() & self.tensors.keys():
                raise error(f"{folder} holds tensor {name} twice, in {self.file_of[name]} and {file}")
            self.tensors |= found
            self.file_of |= dict.fromkeys(found, file)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors."""
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def result_dtype(self, name: str) -> torch.dtype:
        """The type of a tensor of SOURCE in OUT."""
        return self.result_dtypes.get(name, self.tensors[name].dtype)

    def _read_index(self, path: Path) -> dict[str, Any]:
        try:
            index = read_object(path)
            files = list(index["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError) as problem:
            raise self._error(f"{path} cannot be read ({first_line(problem)})") from None
        if not files or not all(isinstance(file, str) and file and Path(file).name == file for file in files):
            raise self._error(f"{path} does not map tensors to files of its folder")
        return index

    def _map_file(self, file: str) -> dict[str, Tensor]:
        path = self.folder / file
        if file.endswith(".safetensors"):
            with safe_open(path, framework="pt") as opened:
                self.metadata[file] = opened.metadata() or {}
                return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no dict
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # files from before torch 1.6 cannot be memory-mapped
            state = torch.load(path, map_location="cpu", weights_only=True)
        return {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same type, shape and bytes. NaN equals itself, and -0.0 differs from 0.0."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    flat = [tensor.contiguous().reshape(-1) for tensor in (a, b)]
    places = [flat[0].nbytes, *(each.storage_offset() * each.itemsize for each in flat)]
    word = torch.int64 if all(place % 8 == 0 for place in places) else torch.uint8  # torch compares word by word
    return bool(torch.equal(flat[0].view(word), flat[1].view(word)))
