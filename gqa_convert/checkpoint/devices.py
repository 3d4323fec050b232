"""The device of a computation: the user's choice, or a GPU if there is one."""

import re
from pathlib import Path

from gqa_convert.errors import OptionError

_OF_GPUS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd")
"""Files of the drivers of GPUs (NVIDIA's, those in WSL, AMD's)."""


def has_gpu_driver() -> bool:
    """Whether this machine may have a GPU, found without importing torch."""
    return any(Path(file).exists() for file in _OF_GPUS)


def chosen_device(asked: str | None) -> str:
    """Return the device to compute on.

    Args:
        asked: the value of `--device`, such as `cpu`, `cuda` or `cuda:1`; None for a GPU if there is one.

    Raises:
        OptionError: there is no such device.
    """
    if asked in ("cpu", "cpu:0"):
        return "cpu"
    if asked is not None and not re.fullmatch(r"cuda(:0|:[1-9][0-9]*)?", asked):
        raise OptionError(f"--device {asked!r} is neither the CPU nor a GPU: write it like cpu, cuda or cuda:1")
    import torch

    if asked is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    count = torch.cuda.device_count()
    if int(asked.partition(":")[2] or 0) >= count:
        raise OptionError(
            f"--device is {asked}, and torch finds {count} GPUs here, counted from 0: name one of them, use --device cpu, or "
            "install torch for the GPU"
        )
    return asked
