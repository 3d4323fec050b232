"""Reads checkpoints with the safetensors library and torch, not with the reader that the converter uses."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from gqa_convert.errors import first_line

JsonObject = dict[str, Any]
Tensors = dict[str, Tensor]

CONFIG = "config.json"
PROVENANCE = "gqa_conversion.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PREFERENCE = (SINGLE, INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
"""The order in which transformers looks for weights."""


class Weights:
    """The tensors of a checkpoint folder, mapped into memory: reading one reads the file.

    Args:
        folder: the checkpoint's folder.

    Raises:
        Exception: whatever the libraries raise for files that cannot be read; ValueError for those that do not make one
            checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: Tensors = {}
        """Every tensor in the files, whatever the index says."""
        self.file_of: dict[str, str] = {}
        """By tensor."""
        self.metadata: dict[str, str] = {}
        """Of all safetensors files together."""
        self.weight_map: dict[str, str] | None = None
        """The file of each tensor, as an index states it."""
        self.chosen = next((name for name in PREFERENCE if (folder / name).is_file()), "")
        if not self.chosen:
            raise ValueError(f"{folder} has no weights: it has none of {', '.join(PREFERENCE)}")
        self.files = [self.chosen]
        if self.chosen.endswith(".json"):
            weight_map: dict[str, str] = json.loads((folder / self.chosen).read_bytes())[
                "weight_map"
            ]
            self.weight_map = weight_map
            self.files = sorted(set(weight_map.values()))
        for file in self.files:
            if Path(file).name != file:
                raise ValueError(f"{self.chosen} names {file}, which is no file of its folder")
            try:
                found = self._map_file(file)
            except Exception as problem:
                raise ValueError(
                    f"{folder / file} cannot be read ({first_line(problem)})"
                ) from None
            twice = found.keys() & self.tensors.keys()
            if twice:
                raise ValueError(f"{folder} holds tensor {min(twice)} twice, once in {file}")
            self.tensors |= found
            self.file_of |= dict.fromkeys(found, file)

    def _map_file(self, file: str) -> Tensors:
        path = self.folder / file
        if file.endswith(".safetensors"):
            with safe_open(path, framework="pt") as opened:
                self.metadata |= opened.metadata() or {}
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
    try:
        return bool(
            torch.equal(*(each.view(torch.int64) for each in flat))
        )  # torch compares word by word
    except RuntimeError:  # the bytes are no whole words, or do not lie as words
        return bool(torch.equal(*(each.view(torch.uint8) for each in flat)))


def half_units(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """The most by which numbers change when they are rounded to a type."""
    limits = torch.finfo(dtype)
    exponent = torch.frexp(numbers.double().abs().clamp(min=limits.tiny)).exponent
    return torch.exp2(exponent.double() - 1) * (limits.eps / 2)
