"""Merging K/V heads by joint factorisation: one shared head, and for each old one a map that its neighbouring
projection absorbs.

A shared value head V and output columns O M_h stand in for values V_h and columns O; a shared key head K and query rows
M_h^T Q stand in for keys K_h and queries Q. Heads that differ by a linear map merge without any loss. Under rotary
positions only maps that commute with
the rotation can be absorbed: within one frequency, multiplication by a complex number.

Shape legend: m K/V heads of a group, r query heads that read each of them, c head width, d model width, f rotary
frequencies. Everything is float64. A covariance is E[x x^T], [d, d], of the layer's inputs; without one the identity
stands in. Queries that are made of other inputs than keys (cross-attention) have a covariance of their own, and a width
of their own. A bias is one more input column, with inputs and covariance extended by a constant one.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_LEAST = 1e-12
"""Of an eigenvalue, relative to the largest: directions that nothing reads must not be divided by."""


def factor(rows: Array, weights: Array, covariance: Array | None = None) -> tuple[Array, Array]:
    """The rank-c stand-in for m heads that loses least (the truncated decomposition of the weighed, stacked heads).

    Minimises the sum over heads of E|L_h (V_h - M_h V) x|^2 with L_h^T L_h the head's weight: for values that is what
    the output projection makes of the difference, for keys what the queries do.

    Args:
        rows: [m, c, d], keys or values.
        weights: [m, c, c], symmetric: how strongly each direction of a head is read.
        covariance: of the inputs.

    Returns:
        The shared head [c, d], with the root mean square of the old ones, and maps [m, c, c].
    """
    heads, width, _ = rows.shape
    roots = np.stack([root(weight) for weight in weights])
    weighed = (roots @ rows).reshape(heads * width, -1)
    gram = weighed @ weighed.T if covariance is None else weighed @ covariance @ weighed.T
    leading = np.linalg.eigh(gram)[1][:, ::-1][:, :width]
    shared = leading.T @ weighed
    maps = np.linalg.solve(roots, leading.reshape(heads, width, width))
    scale = _rms(rows) / _rms(shared)
    return shared * scale, maps / scale


def factor_values(
    values: Array, outputs: Array, covariance: Array | None = None, *, weighted: bool = True
) -> tuple[Array, Array]:
    """Merge values, under any kind of positions.

    Args:
        values: [m, c, d].
        outputs: [m, r, D, c], the output projection's columns of each query head.
        covariance: of the inputs.
        weighted: weigh by the columns. Without a covariance the plain decomposition lost less on the models tried.

    Returns:
        The shared value head [c, d] and new columns [m, r, D, c].
    """
    weights = (
        np.einsum("mrDc,mrDe->mce", outputs, outputs)
        if weighted
        else np.tile(np.eye(values.shape[1]), (len(values), 1, 1))
    )
    shared, maps = factor(values, weights, covariance)
    return shared, outputs @ maps[:, None]


def factor_keys(
    keys: Array, queries: Array, covariance: Array | None = None, asking: Array | None = None
) -> tuple[Array, Array]:
    """Merge keys without positions, or the rows of partly rotary ones that do not turn.

    Args:
        keys: [m, c, d].
        queries: [m, r, c, d]; d may differ from that of the keys.
        covariance: of the keys' inputs.
        asking: of the queries' inputs, where they are others (cross-attention).

    Returns:
        The shared key head [c, d], rows by strength, the strongest first, and new query rows [m, r, c, d].
    """
    asking = covariance if asking is None else asking
    read = queries if asking is None else queries @ asking
    shared, maps = factor(keys, np.einsum("mrcd,mred->mce", read, queries), covariance)
    return shared, np.swapaxes(maps, -1, -2)[:, None] @ queries


def factor_rotary_keys(
    keys: Array, queries: Array, covariance: Array | None = None, asking: Array | None = None
) -> tuple[Array, Array]:
    """Merge keys under rotary positions, frequency by frequency.

    Of the complex key channels z_h of a frequency, weighed by the power of the queries that read them, the leading
    direction is kept: the eigenvector of a Hermitian m x m matrix.

    Args:
        keys: [m, f, d], complex: one row of each pair is the real part, the other the imaginary one.
        queries: [m, r, f, d], likewise.
        covariance: of the keys' inputs, not centred: the mean key holds the attention sink.
        asking: of the queries' inputs, where they are others.

    Returns:
        The shared key head [f, d] and new query rows [m, r, f, d], complex.
    """
    seen = keys if covariance is None else _times(keys, covariance)
    asking = covariance if asking is None else asking
    asked = queries if asking is None else _times(queries, asking)
    power = np.einsum("mrfd,mrfd->fm", asked, queries.conj()).real
    strength = np.sqrt(np.maximum(power, _LEAST * (power.max() or 1.0)))  # [f, m]
    gram = np.einsum("mfd,nfd->fmn", seen, keys.conj()) * strength[:, :, None] * strength[:, None, :]
    leading = np.linalg.eigh(gram)[1][:, :, -1]  # [f, m]
    shared = np.einsum("fm,mfd->fd", leading.conj() * strength, keys)
    multipliers = leading / strength
    before, after = np.mean(np.abs(keys) ** 2, axis=(0, 2)), np.mean(np.abs(shared) ** 2, axis=1)
    dead = (before == 0) | (after == 0)
    scale = np.sqrt(np.where(dead, 1.0, before) / np.where(dead, 1.0, after))
    turn = (
        np.exp(1j * np.angle(multipliers.mean(1))) * scale
    )  # a mean multiplier that is real and positive, keys as long as before
    return shared * turn[:, None], np.einsum("fm,mrfd->mrfd", (multipliers / turn[:, None]).conj(), queries)


def _times(rows: Array, matrix: Array) -> Array:
    """Complex rows times a real matrix, which numpy would make complex: twice the work, and a copy of it."""
    return np.asarray(rows.real @ matrix + 1j * (rows.imag @ matrix))


def root(matrix: Array) -> Array:
    """The symmetric positive root of a symmetric matrix [c, c], directions without weight raised to a little."""
    values, vectors = np.linalg.eigh(matrix)
    return np.asarray((vectors * np.sqrt(np.maximum(values, _LEAST * max(values[-1], _LEAST)))) @ vectors.T)


def _rms(array: Array) -> float:
    return float(np.sqrt(np.mean(np.square(array)))) or 1.0
