"""How fast a device multiplies matrices, for estimates of time."""

import os
import re
import time
import tomllib
from pathlib import Path
from typing import Any

from gqa_convert.runtime.machine import _stated, usable_cores

GPUS: dict[str, tuple[int, int]] = tomllib.loads(
    Path(__file__).with_name("gpus.toml").read_text(encoding="utf-8")
)
"""Dense bfloat16 teraflops and gigabytes of GPUs."""
_SMALL, _MIDDLING, _LARGE = 64, 256, 4096
"""Rows of the matrices whose products are measured: in numpy, in torch on a CPU, and on a GPU."""
_MEASURED = 0.25
"""Seconds that a product is repeated for."""


def known_gpu(device: str) -> str | None:
    """The name in `GPUS` of a torch device; None of a CPU, and of a GPU that is not listed.

    Args:
        device: such as `cuda:1`.
    """
    if device == "cpu":
        return None
    name = _stated("gpu_name")
    if name is None:
        import torch

        name = torch.cuda.get_device_properties(torch.device(device)).name
    found = [known for known in GPUS if _squeezed(known) in _squeezed(name)]
    return max(found, key=len, default=None)


def _squeezed(name: str) -> str:
    return re.sub("[ _-]", "", name.lower())


def measured_speed(device: str, dtype: str) -> float:
    """Operations per second in products of square matrices, measured now.

    Of a CPU, one core is measured, by products so small that numpy divides none among cores, and
    the best of them, so that other work on the machine counts little.

    Args:
        device: a torch device.
        dtype: a torch type, such as `float32`.
    """
    stated = _stated("speed")
    if stated is not None:
        return float(stated)
    if device == "cpu" and dtype != "bfloat16":  # torch is slow to import
        import numpy as np

        small = np.ones((_SMALL, _SMALL), dtype)
        return _threads() * _best_speed(small)
    import torch

    if device != "cpu":
        return _best_speed(torch.ones(_LARGE, _LARGE, dtype=getattr(torch, dtype), device=device))
    threads = int(torch.get_num_threads())
    torch.set_num_threads(1)
    try:
        middling = torch.ones(_MIDDLING, _MIDDLING, dtype=torch.bfloat16)
        return threads * _best_speed(middling)
    finally:
        torch.set_num_threads(threads)


def _threads() -> int:
    return int(os.environ.get("OMP_NUM_THREADS", usable_cores()))


def _best_speed(matrix: Any) -> float:
    """Operations per second in the fastest of some products of a matrix with itself."""
    seconds: list[float] = []
    began = time.perf_counter()
    while time.perf_counter() - began < _MEASURED or len(seconds) < 3:
        started = time.perf_counter()
        float((matrix @ matrix)[0, 0])  # which waits for a GPU
        seconds.append(time.perf_counter() - started)
    return float(2 * len(matrix) ** 3 / min(seconds))
