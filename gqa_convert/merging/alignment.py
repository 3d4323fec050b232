"""Alignment of heads before they are averaged (Jin et al. 2024): a rotation for each value head, and a phase for each
rotary pair of keys.

This is a factorisation with orthogonal maps, and with the mean in place of the leading direction. It needs no data and
keeps the scale of every head. The shape legend is that of `factorisation`.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_ROUNDS = 30


def align_values(values: Array, outputs: Array) -> tuple[Array, Array]:
    """Rotate each head towards the mean of all (generalised Procrustes analysis, Gower 1975), then average.

    Args:
        values: [m, c, d].
        outputs: [m, r, D, c].

    Returns:
        The shared value head [c, d] and new columns [m, r, D, c].
    """
    heads, head_dim, _ = values.shape
    stacked = values.reshape(heads * head_dim, -1)
    products = (stacked @ stacked.T).reshape(heads, head_dim, heads, head_dim).transpose(0, 2, 1, 3)  # [m, m, c, c]
    rotations = np.empty((heads, head_dim, head_dim))
    towards = products[0]  # [m, c, c], the mean times each head
    for _ in range(_ROUNDS):
        left, _, right = np.linalg.svd(towards)
        rotations = left @ right
        towards = np.einsum("kab,khbc->hac", rotations, products, optimize=True) / heads
    return (rotations @ values).mean(0), outputs @ np.swapaxes(rotations, -1, -2)[:, None]


def align_rotary_keys(keys: Array, queries: Array) -> tuple[Array, Array]:
    """Rotate each rotary pair of each head by the angle that brings it nearest to the mean, then average.

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
        phases = np.exp(-1j * np.angle(towards))
        towards = (products @ phases.conj()[:, :, None])[:, :, 0]
    phases = phases.T
    return (phases[:, :, None] * keys).mean(0), phases[:, None, :, None] * queries
