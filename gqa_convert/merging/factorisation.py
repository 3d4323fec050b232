"""Merging K/V heads by joint factorisation: one shared head, and a map for each source head that its readers absorb.

A head's rows are read by rows of another projection: keys by queries, values by the columns of the output projection. A
shared head V and readers M_h^T R take the place of heads V_h and their readers R. Heads that differ by a linear map merge
without loss. Under rotary positions only maps that commute with the rotation can be absorbed: multiplication by one
complex number per frequency, so that each frequency is a factorisation of its own, of heads with one complex row.

Shape legend: h K/V heads, r readers of each, c rows of a head, d and e inputs of rows and of readers, N groups. A covariance
is E[x x^T] of inputs, and None stands for the identity. Everything is float64.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_LEAST = 1e-12
"""The least eigenvalue, relative to the largest: nothing may be divided by the weight of an unread direction."""


@dataclass(frozen=True, slots=True)
class Channels:
    """Rows of K/V heads that one map per head may mix, and the rows that read them. Axes in front of h are independent of
    one another.
    """

    rows: Array
    """[..., h, c, d]."""
    readers: Array
    """[..., h, r, c, e]."""
    covariance: Array | None
    """[d, d], of the rows' inputs."""
    reader_covariance: Array | None
    """[e, e], of the readers' inputs."""
    weighted: bool = True
    """Whether directions of a head count as strongly as they are read."""

    def weights(self) -> Array:
        """[..., h, c, c], or [c, c] for all heads: how strongly each direction of a head counts."""
        if not self.weighted:
            return np.eye(self.rows.shape[-2])
        return np.asarray(np.sum(times(self.readers, self.reader_covariance) @ adjoint(self.readers), axis=-3))


def factor(channels: Channels, groups: int) -> tuple[Array, Array]:
    """Replace contiguous heads by the shared heads that lose least: the truncated decomposition of the weighted, stacked
    heads of each group.

    It minimises the sum over heads of E|L_h (V_h - M_h V) x|^2, where L_h^T L_h is the head's weight: the difference that
    the readers see.

    Args:
        channels: of the source.
        groups: N, a divisor of h.

    Returns:
        The shared heads [..., N, c, d], with the root mean square of their source heads, each with its strongest row
        first; and the readers [..., h, r, c, e] that have absorbed the maps.
    """
    *others, heads, rows, inputs = channels.rows.shape
    size = heads // groups
    roots = root(channels.weights())
    stacked = (roots @ channels.rows).reshape(*others, groups, size * rows, inputs)
    gram = times(stacked, channels.covariance) @ adjoint(stacked)
    leading = np.linalg.eigh(gram)[1][..., ::-1][..., :rows]
    shared = adjoint(leading) @ stacked
    maps = np.linalg.solve(roots, leading.reshape(*others, heads, rows, rows))
    # the maps can be divided by any number that the shared head is multiplied by
    wanted = _norms(channels.rows.reshape(*others, groups, size * rows, inputs)) / np.sqrt(size)
    found = _norms(shared)
    gauge = np.divide(wanted, found, out=np.ones_like(found), where=found > 0)
    maps = maps.reshape(*others, groups, size, rows, rows) / gauge[..., None]
    if np.iscomplexobj(maps):  # the mean multiplier becomes real and positive
        phase = np.exp(1j * np.angle(maps.mean(-3)))
        gauge, maps = gauge * phase, maps / phase[..., None, :, :]
    maps = maps.reshape(*others, heads, 1, rows, rows)
    return shared * gauge, adjoint(maps) @ channels.readers


def _norms(rows: Array) -> Array:
    """[..., 1, 1]: the Frobenius norms of matrices [..., n, d]."""
    return np.asarray(np.linalg.norm(rows, axis=(-2, -1), keepdims=True))


def times(rows: Array, matrix: Array | None) -> Array:
    """Rows [..., d], perhaps complex, times a real matrix [d, d]; without one, the rows themselves."""
    if matrix is None:
        return rows
    if np.iscomplexobj(rows):  # numpy would make the matrix complex, with a copy and twice the work
        return np.tensordot(rows.real, matrix, 1) + 1j * np.tensordot(rows.imag, matrix, 1)
    return np.tensordot(rows, matrix, 1)


def adjoint(matrix: Array) -> Array:
    """The conjugate transpose of the last two axes."""
    return matrix.conj().swapaxes(-1, -2)


def root(matrix: Array) -> Array:
    """The symmetric positive root of symmetric matrices [..., c, c], in which no eigenvalue is below a small bound."""
    values, vectors = np.linalg.eigh(matrix)
    least = _LEAST * np.maximum(values[..., -1:], _LEAST)
    return np.asarray((vectors * np.sqrt(np.maximum(values, least))[..., None, :]) @ adjoint(vectors))
