"""Loads a source model for calibration; weights that do not fit on its device are offloaded by accelerate."""

import weakref
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutput

from gqa_convert.checkpoint.machine import available_memory
from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.families.loading import check_complete, load_model

_HEAD = "calibration compares its predictions; merge its heads without text"
_SHARE = 0.7
"""The share of free memory that weights may take; the rest is for activations."""


def open_model(folder: Path, *, device: str = "cpu", memory_limit: int | None = None) -> Any:
    """Load a model with logits in float32, in evaluation mode and without gradients.

    Args:
        folder: a local checkpoint.
        device: the device to run it on.
        memory_limit: the bytes that its weights may take on the device; None for 70% of the free memory. What does not
            fit stays in the machine's memory or on the disk, and each module's weights are read when it runs.

    Raises:
        CorruptCheckpointError: parameters are missing in the folder.
        NoLanguageModelError: the language-model head is missing, and the folder does not claim to have one.
        GQAConvertError: see `open_checkpoint`.
        Exception: any error of transformers.
    """
    place = torch.device(device)
    limit = _free_memory(place) if memory_limit is None else memory_limit
    needed = sum(entry.elements for _, _, entry in open_checkpoint(folder).tensors()) * torch.float32.itemsize
    if needed <= limit:
        model, missing = load_model(folder, torch.float32)
        model.to(place)
    else:
        memory: dict[str | int, int] = {"cpu": _free_memory(torch.device("cpu"))}
        memory[(place.index or 0) if place.type == "cuda" else "cpu"] = limit
        scratch = TemporaryDirectory(prefix="gqa-offload-", ignore_cleanup_errors=True)
        model, missing = load_model(
            folder, torch.float32, device_map="auto", max_memory=memory, offload_folder=scratch.name
        )
        weakref.finalize(model, scratch.cleanup)
    check_complete(str(folder), folder, model, missing, _HEAD)
    model.register_forward_pre_hook(_take_encoder_outputs, with_kwargs=True)
    return model.requires_grad_(False)


def _free_memory(place: torch.device) -> int:
    return int(_SHARE * (available_memory(place) or 1 << 62))


def _take_encoder_outputs(model: Any, args: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Let a model take what its encoder made of a batch as a tensor, [B, positions, hidden_size], of any type. It stays
    in that type where products are made in half precision anyway.
    """
    encoded = inputs.get("encoder_outputs")
    if isinstance(encoded, torch.Tensor):
        if not torch.is_autocast_enabled(encoded.device.type):
            encoded = encoded.to(model.dtype)
        inputs = inputs | {"encoder_outputs": BaseModelOutput(last_hidden_state=encoded)}
    return args, inputs


def is_offloaded(model: Any) -> bool:
    """Whether some weights are elsewhere than where the model runs."""
    return any(parameter.is_meta for parameter in model.parameters())
