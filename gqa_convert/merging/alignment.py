"""Aligning heads before they are averaged (Jin et al. 2024): a rotation for each value head, a phase for each rotary pair of keys.

A factorisation with orthogonal maps only, and the mean in place of the leading direction: it needs no data and keeps the scale of
every head. Shape legend as in `factorisation`.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_ROUNDS = 30


def align_values(values: Array, outputs: Array) -> tuple[Array, Array]:
    """Turn each head towards the mean of all (generalised Procrustes analysis, Gower 1975), then average.

    Args:
        values: [m, c, d].
        outputs: [m, r, D, c].

    Returns:
        The shared value head [c, d] and new columns [m, r, D, c].
    """
    mean = values[0]
    turns = np.empty((len(values), values.shape[1], values.shape[1]))
    for _ in range(_ROUNDS):
        left, _, right = np.linalg.svd(mean @ np.swapaxes(values, -1, -2))
        turns = left @ right
        mean = (turns @ values).mean(0)
    return mean, outputs @ np.swapaxes(turns, -1, -2)[:, None]


def align_rotary_keys(keys: Array, queries: Array) -> tuple[Array, Array]:
    """Turn each rotary pair of each head by the angle that brings it nearest to the mean, then average.

    Args:
        keys: [m, f, d], complex.
        queries: [m, r, f, d], complex.

    Returns:
        The shared key head [f, d] and new query rows [m, r, f, d], complex.
    """
    mean = keys[0]
    turns = np.ones(keys.shape[:2], complex)
    for _ in range(_ROUNDS):
        turns = np.exp(-1j * np.angle(np.einsum("mfd,fd->mf", keys, mean.conj())))
        mean = (turns[:, :, None] * keys).mean(0)
    return mean, turns[:, None, :, None] * queries
