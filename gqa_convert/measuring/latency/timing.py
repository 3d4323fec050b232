"""Times work on a device, and lets versions take turns, so that a machine whose speed drifts favours none of them."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def timed(work: Callable[[], object], device: Any) -> float:
    """The seconds that the work takes on a torch device."""
    _wait(device)
    began = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - began


def _wait(device: Any) -> None:
    """Wait for a GPU, which works asynchronously."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def alternate(turns: Sequence[Callable[[], float]], repetitions: int) -> list[list[float]]:
    """Run every version once per repetition, starting one version later in every repetition, after a warm-up.

    Args:
        turns: a call for each version, which measures it once.
        repetitions: number of measured repetitions.

    Returns:
        The results of each version's turns, in order, without those of the warm-up.
    """
    measured: list[list[float]] = [[] for _ in turns]
    for repetition in range(-1, repetitions):  # the first warms up
        for place in range(len(turns)):
            number = (repetition + place) % len(turns)
            found = turns[number]()
            if repetition >= 0:
                measured[number].append(found)
    return measured


def quartiles(values: Sequence[float]) -> list[float]:
    """The lower quartile, the median and the upper quartile."""
    found: list[float] = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return found
