"""Aligning heads before they are averaged (Jin et al. 2024): a rotation for each value head, a phase for each rotary
pair of keys.

A factorisation with orthogonal maps only, and the mean in place of the leading direction: it needs no data and keeps
the scale of every head. Shape legend as in `factorisation`.
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
    heads, width, _ = values.shape
    stacked = values.reshape(heads * width, -1)
    products = (
        (stacked @ stacked.T).reshape(heads, width, heads, width).transpose(0, 2, 1, 3)
    )  # [m, m, c, c]; the mean itself can wait
    turns = np.empty((heads, width, width))
    towards = products[0]  # [m, c, c], the mean times each head
    for _ in range(_ROUNDS):
        left, _, right = np.linalg.svd(towards)
        turns = left @ right
        towards = np.einsum("kab,khbc->hac", turns, products, optimize=True) / heads
    return (turns @ values).mean(0), outputs @ np.swapaxes(turns, -1, -2)[:, None]


def align_rotary_keys(keys: Array, queries: Array) -> tuple[Array, Array]:
    """Turn each rotary pair of each head by the angle that brings it nearest to the mean, then average.

    Args:
        keys: [m, f, d], complex.
        queries: [m, r, f, d], complex.

    Returns:
        The shared key head [f, d] and new query rows [m, r, f, d], complex.
    """
    by_pair = keys.transpose(1, 0, 2)
    products = by_pair @ by_pair.conj().transpose(0, 2, 1)  # [f, m, m]
    towards = products[:, :, 0]  # [f, m], each head times the mean
    for _ in range(_ROUNDS):
        turns = np.exp(-1j * np.angle(towards))
        towards = (products @ turns.conj()[:, :, None])[:, :, 0]
    turns = turns.T
    return (turns[:, :, None] * keys).mean(0), turns[:, None, :, None] * queries
