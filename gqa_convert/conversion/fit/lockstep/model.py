"""Opens a source model for calibration: in memory if it fits, otherwise with its weights left in the checkpoint's files."""

import logging
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.fit.lockstep.offloading import OffloadedWeights
from gqa_convert.families.loading import check_complete, load_model

_HEAD = "calibration compares its predictions; merge its heads without text"
_SHARE = 0.7
"""The share of free memory that weights may take; the rest is for activations."""


def open_model(
    folder: Path,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    memory_limit: int | None = None,
) -> Any:
    """Open a model with logits, in evaluation mode and without gradients.

    Args:
        folder: a local checkpoint.
        device: the device to run it on.
        dtype: the dtype to compute in.
        memory_limit: the bytes that its weights may take on the device; None for 70% of the free memory. The weights of
            a larger model stay in the files, and each is read when it is used.

    Raises:
        CorruptCheckpointError: parameters are missing in the folder.
        NoLanguageModelError: the language-model head is missing, and the folder does not claim to have one.
        GQAConvertError: see `open_checkpoint`.
        Exception: any error of transformers.
    """
    place = torch.device(device)
    needed = sum(entry.elements for _, _, entry in open_checkpoint(folder).tensors()) * dtype.itemsize
    limit = memory_limit if memory_limit is not None else _free(place)
    if needed <= limit:
        model, missing = load_model(folder, dtype)
        check_complete(str(folder), folder, model, missing, _HEAD)
        return model.requires_grad_(False).to(place)
    model = _left_on_disk(folder, dtype)
    OffloadedWeights(model, place)
    return model


def _left_on_disk(folder: Path, dtype: torch.dtype) -> Any:
    scratch = tempfile.mkdtemp(prefix="gqa-offload-")  # for the few weights that transformers rewrites while loading
    try:
        with _no_remark():
            model, missing = load_model(folder, dtype, device_map={"": "disk"}, offload_folder=scratch)
        check_complete(str(folder), folder, model, missing, _HEAD)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    weakref.finalize(model, shutil.rmtree, scratch, ignore_errors=True)
    return model.requires_grad_(False)


@contextmanager
def _no_remark() -> Iterator[None]:
    """Silence accelerate's warning that weights are on disk, which is intended."""
    logger = logging.getLogger("accelerate.big_modeling")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _free(device: torch.device) -> int:
    """The bytes that weights may take."""
    from accelerate.utils import get_max_memory

    memory = get_max_memory()
    index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
    return int(_SHARE * memory.get("cpu" if device.type == "cpu" else index, memory["cpu"]))
