"""Dequantises FP8 weights with scales per block or per tensor, file by file.

transformers dequantises them too, but takes the size of a block from the number of scales. For a matrix whose last block
is cut off, that gives most numbers another block's scale, without an error.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from gqa_convert.checkpoint.formats import SAFETENSORS_INDEX, SAFETENSORS_SINGLE
from gqa_convert.checkpoint.strict_json import JsonObject, parse_object
from gqa_convert.errors import CorruptCheckpointError, UnsupportedFormatError

_SCALE: Final = "_scale_inv"
"""What the name of a weight's scales ends in behind the weight's name; weights are multiplied by them."""
_ACTIVATION_SCALES = (".input_scale", ".activation_scale")


def block_of(quantisation: Mapping[str, Any]) -> tuple[int, int] | None:
    """The rows and columns of a block by a config's `quantization_config`; None where a tensor has one scale."""
    stated = quantisation.get("weight_block_size")
    if stated is None:
        return None
    rows, columns = stated
    return int(rows), int(columns)


def write_dequantised(source: Path, quantisation: Mapping[str, Any], folder: Path) -> None:
    """Write all weights in bfloat16, in files of the same names.

    Args:
        source: the checkpoint's folder.
        quantisation: the config's `quantization_config`.
        folder: an empty folder.

    Raises:
        UnsupportedFormatError: weights in FP8 have no scales that belong to the config.
        CorruptCheckpointError: a file cannot be read.
    """
    index = source / SAFETENSORS_INDEX
    weight_map: dict[str, str] = {}
    metadata: JsonObject = {}
    if not (source / SAFETENSORS_SINGLE).is_file() and index.is_file():
        stated = parse_object(index.read_bytes(), str(index))
        weight_map, metadata = stated["weight_map"], stated.get("metadata") or {}
    files = sorted(set(weight_map.values())) or [SAFETENSORS_SINGLE]
    reader = _Reader(source, weight_map, block_of(quantisation))
    written: dict[str, str] = {}
    total = 0
    for file in files:
        names, nbytes = _write_file(reader, file, folder)
        written |= dict.fromkeys(names, file)
        total += nbytes
    if weight_map:
        content = {"metadata": metadata | {"total_size": total}, "weight_map": dict(sorted(written.items()))}
        (folder / SAFETENSORS_INDEX).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


class _Reader:
    """The tensors of a checkpoint; scales may be in another file than their weights."""

    def __init__(self, folder: Path, weight_map: Mapping[str, str], block: tuple[int, int] | None) -> None:
        self.folder, self._files, self._block = folder, weight_map, block

    def open(self, file: str) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            return safe_open(self.folder / file, "pt")
        except (OSError, SafetensorError) as problem:
            raise CorruptCheckpointError(
                f"{self.folder / file} cannot be read ({problem}): download or copy it again"
            ) from None

    def restored(self, name: str, tensor: Any, beside: Any, names: set[str]) -> Any:
        """A tensor in bfloat16; None for one that only belongs to the quantisation.

        Args:
            name: of the tensor.
            tensor: as it is stored.
            beside: the open file that it is in.
            names: the tensors in that file.
        """
        import torch

        if name.endswith((_SCALE, *_ACTIVATION_SCALES)):
            return None
        if tensor.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
            return tensor.to(torch.bfloat16) if tensor.dtype in (torch.float16, torch.float32) else tensor
        scales = f"{name}{_SCALE}"
        if scales in names:
            scale = beside.get_tensor(scales)
        elif scales in self._files:
            with self.open(self._files[scales]) as other:
                scale = other.get_tensor(scales)
        else:
            raise self._unknown(name, "it has no scales")
        return self._scaled(name, tensor.float(), scale.float()).to(torch.bfloat16)

    def _scaled(self, name: str, tensor: Any, scale: Any) -> Any:
        if scale.numel() == 1:
            return tensor * scale.reshape(())
        rows, columns = tensor.shape[-2:]
        if self._block is None or tensor.dim() < 2:
            raise self._unknown(name, f"it has scales {list(scale.shape)} and the config no weight_block_size")
        down, across = self._block
        if tuple(scale.shape[-2:]) != (-(-rows // down), -(-columns // across)):
            raise self._unknown(
                name,
                f"its scales {list(scale.shape)} do not belong to blocks of {down} x {across} of {list(tensor.shape)}",
            )
        # the last blocks of a row and of a column may be cut off
        return tensor * scale.repeat_interleave(down, -2)[..., :rows, :].repeat_interleave(across, -1)[..., :columns]

    def _unknown(self, name: str, problem: str) -> UnsupportedFormatError:
        return UnsupportedFormatError(
            f"{self.folder}: the FP8 tensor {name} cannot be dequantised ({problem}): convert the unquantised checkpoint that it was made from"
        )


def _write_file(reader: _Reader, file: str, folder: Path) -> tuple[list[str], int]:
    """Write one file; returns its tensors' names and their bytes."""
    from safetensors.torch import save_file

    with reader.open(file) as opened:
        names = set(opened.keys())
        tensors = {name: reader.restored(name, opened.get_tensor(name), opened, names) for name in sorted(names)}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / file, {"format": "pt"})
    return list(kept), sum(tensor.nbytes for tensor in kept.values())
