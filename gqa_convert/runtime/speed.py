"""How fast a device multiplies matrices, for estimates of time."""

import os
import re
import time
import tomllib
from pathlib import Path
from typing import Any

from .machine import _stated, usable_cores

GPUS: dict[str, tuple[int, int]] = tomllib.loads(
    Path(__file__).with_name("gpus.toml").read_text(encoding="utf-8")
)
"""Dense bfloat16 teraflops and gigabytes of GPUs."""
_GPU_SHARE = 0.15
"""Of a GPU's peak: gradient steps of a layer reached 5%, uptraining 22 to 27%
(docs/results/README.md).
"""
_SMALL, _LARGE = 64, 4096
"""Rows of the matrices whose products are measured, on a core and on a GPU: numpy divides no
product so small among cores.
"""
_MEASURED = 0.25
"""Seconds that a product is repeated for."""


def device_speed(device: str) -> float:
    """Operations per second in products of matrices: of a CPU in float32, measured on one core
    without torch, which is slow to import; of a GPU in bfloat16, a share of its peak if it is
    known, or measured.

    Args:
        device: such as `cpu` or `cuda:1`.
    """
    gpu = known_gpu(device)
    if gpu is not None:
        teraflops, _ = GPUS[gpu]
        return teraflops * 1e12 * _GPU_SHARE
    stated = _stated("speed")
    if stated is not None:
        return float(stated)
    if device == "cpu":
        import numpy as np

        cores = int(os.environ.get("OMP_NUM_THREADS", usable_cores()))
        return cores * _best_speed(np.ones((_SMALL, _SMALL), np.float32))
    import torch

    return _best_speed(torch.ones(_LARGE, _LARGE, dtype=torch.bfloat16, device=device))


def known_gpu(device: str) -> str | None:
    """The name in `GPUS` of a torch device; None of a CPU, and of a GPU that is not listed."""
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


def _best_speed(matrix: Any) -> float:
    """Operations per second in the fastest of some products of a matrix with itself, so that other
    work on the machine counts little.
    """
    seconds: list[float] = []
    began = time.perf_counter()
    while time.perf_counter() - began < _MEASURED or len(seconds) < 3:
        started = time.perf_counter()
        float((matrix @ matrix)[0, 0])  # which waits for a GPU
        seconds.append(time.perf_counter() - started)
    return float(2 * len(matrix) ** 3 / min(seconds))
