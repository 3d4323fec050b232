"""A full disk or memory during the fit, as one line."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gqa_convert.checkpoint.resource_errors import is_disk_full, is_out_of_memory
from gqa_convert.errors import DeviceMemoryError, NoSpaceError


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Translate errors.

    Args:
        folder: where activations and merged layers are kept.

    Raises:
        NoSpaceError: the disk is full.
        DeviceMemoryError: the memory of the GPU or of the machine is full.
    """
    again = "and run the same command again, which resumes from the finished layers"
    try:
        yield
    except OSError as problem:
        if not is_disk_full(problem):
            raise
        raise NoSpaceError(
            f"the disk or quota of {folder} is full, where the activations of the calibration text are stored: make room, or lower "
            f"--calibration-tokens, {again}"
        ) from None
    except (MemoryError, RuntimeError) as problem:
        if not is_out_of_memory(problem):
            raise
        raise DeviceMemoryError(
            f"out of memory: lower --calibration-length (which fits all layers anew), or leave the last stage out with --kl-steps 0, or stop what else uses the GPU, or hide the GPU with CUDA_VISIBLE_DEVICES=, {again}"
        ) from None
