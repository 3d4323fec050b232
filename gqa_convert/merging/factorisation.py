"""Merging K/V heads by joint factorisation: one shared head, and a map for each source head that
its readers absorb.

A head's rows are read by rows of another projection: keys by queries, values by the columns of the
output projection. A shared head V and readers M_h^T R take the place of heads V_h and their readers
R. Heads that differ by a linear map merge without loss. Under rotary positions only maps that
commute with the rotation can be absorbed: multiplication by one complex number per frequency, so
that each frequency is a factorisation of its own, of heads with one complex row.

Shape legend: h K/V heads, r readers of each, c rows of a head, d and e inputs of rows and of
readers, N groups. A covariance is E[x x^T] of inputs, and None stands for the identity. Everything
is float64, in arrays of numpy or, on the device where a model runs, of torch: both speak the array
API.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from array_api_compat import array_namespace, device, to_device

Array = Any
"""Of numpy or of torch."""

_TINY = 1e-37
"""Added to sizes, so that heads of zeros have some."""
_LEAST = 1e-12
"""The least eigenvalue, relative to the largest: nothing may be divided by the weight of an unread
direction.
"""


@dataclass(frozen=True)
class Channels:
    """Rows of K/V heads that one map per head may mix, and the rows that read them. Axes in front
    of h are independent of one another.

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
    """Replace contiguous heads by the shared heads that lose least: the truncated decomposition of
    the weighted, stacked heads of each group.

    It minimises the sum over heads of E|L_h (V_h - M_h V) x|^2, where L_h^T L_h is the head's
    weight: the difference that the readers see.

    Args:
        channels: of the source.
        groups: N, a divisor of h.

    Returns:
        The shared heads [..., N, c, d], with the root mean square of their source heads, each with
        its strongest row first; and the readers [..., h, r, c, e] that have absorbed the maps.
    """
    xp = array_namespace(channels.rows)
    *others, heads, rows, _ = channels.rows.shape
    size = heads // groups
    # The shared head is what the strongest directions of a group's weighted heads see.
    inverse_roots, stacked = weigh(channels, groups)
    _, directions = xp.linalg.eigh(gram(stacked, channels.covariance))
    leading = xp.flip(directions[..., -rows:], axis=-1)
    shared = adjoint(leading) @ stacked
    # A map makes a head of the shared one, and undoes the weighing.
    maps = inverse_roots @ xp.reshape(leading, (*others, heads, rows, rows))
    maps = xp.reshape(maps, (*others, groups, size, rows, rows))
    # What a shared head is multiplied by divides its maps: the head gets the size of its sources.
    before = xp.linalg.matrix_norm(xp.reshape(channels.rows, stacked.shape), keepdims=True)
    after = xp.linalg.matrix_norm(shared, keepdims=True)
    gauge = (before / math.sqrt(size) + _TINY) / (after + _TINY)
    if _is_complex(maps):  # the mean multiplier becomes real and positive
        mean = xp.mean(maps, axis=-3)
        length = xp.abs(mean)
        gauge = gauge * xp.where(length > 0, mean / (length + _TINY), 1.0)
    maps = xp.reshape(maps / gauge[..., None, :, :], (*others, heads, 1, rows, rows))
    return shared * gauge, adjoint(maps) @ channels.readers


def weigh(channels: Channels, groups: int) -> tuple[Array, Array]:
    """The inverse roots of the heads' weights; and the weighted heads of each group, one behind the
    other, [..., N, m c, d].
    """
    xp = array_namespace(channels.rows)
    *others, heads, rows, inputs = channels.rows.shape
    if channels.weighted:
        weights = xp.sum(gram(channels.readers, channels.reader_covariance), axis=-3)
    else:
        weights = xp.eye(rows, dtype=channels.rows.dtype, device=device(channels.rows))
    roots, inverse_roots = root(weights)
    stacked = xp.reshape(roots @ channels.rows, (*others, groups, heads // groups * rows, inputs))
    return inverse_roots, stacked


def gram(rows: Array, covariance: Array | None) -> Array:
    """[..., n, n]: the expected products of what rows [..., n, d] make of inputs."""
    return times(rows, covariance) @ adjoint(rows)


def times(rows: Array, matrix: Array | None) -> Array:
    """Rows [..., d], perhaps complex, times a real matrix [d, d]; without one, the rows
    themselves.
    """
    if matrix is None:
        return rows
    xp = array_namespace(rows)
    if _is_complex(rows):  # a complex copy of the matrix would take twice the work
        real, imaginary = times(xp.real(rows), matrix), times(xp.imag(rows), matrix)
        return real + 1j * imaginary
    return xp.tensordot(rows, matrix, axes=1)


def adjoint(matrix: Array) -> Array:
    """The conjugate transpose of the last two axes."""
    xp = array_namespace(matrix)
    return xp.matrix_transpose(xp.conj(matrix))


def root(matrix: Array) -> tuple[Array, Array]:
    """The symmetric positive root of symmetric matrices [..., c, c], in which no eigenvalue is
    below a small bound, and its inverse.
    """
    xp = array_namespace(matrix)
    values, vectors = xp.linalg.eigh(matrix)
    least = _LEAST * xp.clip(values[..., -1:], min=_LEAST)
    roots = xp.sqrt(xp.maximum(values, least))[..., None, :]
    return (vectors * roots) @ adjoint(vectors), (vectors / roots) @ adjoint(vectors)


def on_device(array: npt.NDArray[Any], like: Array) -> Array:
    """An array of numpy in the library, and on the device, of another one."""
    return array_namespace(like).asarray(array, device=device(like))


def as_numpy(array: Array) -> npt.NDArray[Any]:
    """An array of any library on any device as one of numpy."""
    return np.asarray(to_device(array, "cpu"))


def _is_complex(array: Array) -> bool:
    return bool(array_namespace(array).isdtype(array.dtype, "complex floating"))
