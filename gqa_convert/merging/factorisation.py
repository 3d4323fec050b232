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

_TINY = 1e-37
"""Added to sizes, so that heads of zeros have some."""
_LEAST = 1e-12
"""The least eigenvalue, relative to the largest: nothing may be divided by the weight of an unread direction."""


@dataclass(frozen=True)
class Channels:
    """Rows of K/V heads that one map per head may mix, and the rows that read them. Axes in front of h are independent of
    one another.

    Attributes:
        rows: [..., h, c, d].
        readers: [..., h, r, c, e].
        covariance: [d, d], of the rows' inputs.
        reader_covariance: [e, e], of the readers' inputs.
        weighted: whether directions of a head count as strongly as they are read.
    """

    rows: Array
    readers: Array
    covariance: Array | None
    reader_covariance: Array | None
    weighted: bool = True


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
    *others, heads, rows, _ = channels.rows.shape
    size = heads // groups
    roots, stacked = weigh(channels, groups)
    leading = np.linalg.eigh(gram(stacked, channels.covariance))[1][..., : -rows - 1 : -1]
    shared = adjoint(leading) @ stacked
    maps = np.linalg.solve(roots, leading.reshape(*others, heads, rows, rows))
    maps = maps.reshape(*others, groups, size, rows, rows)
    # the maps can be divided by any number that the shared head is multiplied by
    before = np.linalg.norm(channels.rows.reshape(stacked.shape), axis=(-2, -1), keepdims=True)
    after = np.linalg.norm(shared, axis=(-2, -1), keepdims=True)
    gauge = (before / np.sqrt(size) + _TINY) / (after + _TINY)
    if np.iscomplexobj(maps):  # the mean multiplier becomes real and positive
        gauge = gauge * np.exp(1j * np.angle(maps.mean(-3)))
    maps = (maps / gauge[..., None, :, :]).reshape(*others, heads, 1, rows, rows)
    return shared * gauge, adjoint(maps) @ channels.readers


def weigh(channels: Channels, groups: int) -> tuple[Array, Array]:
    """The roots of the heads' weights; and the weighted heads of each group, one behind the other, [..., N, m c, d]."""
    *others, heads, rows, inputs = channels.rows.shape
    weights = (
        gram(channels.readers, channels.reader_covariance).sum(-3)
        if channels.weighted
        else np.eye(rows)
    )
    roots = root(weights)
    return roots, (roots @ channels.rows).reshape(*others, groups, heads // groups * rows, inputs)


def gram(rows: Array, covariance: Array | None) -> Array:
    """[..., n, n]: the expected products of what rows [..., n, d] make of inputs."""
    return times(rows, covariance) @ adjoint(rows)


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
    return np.asarray(
        (vectors * np.sqrt(np.maximum(values, least))[..., None, :]) @ adjoint(vectors)
    )
