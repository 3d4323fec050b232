"""Merging K/V heads by joint factorisation: one shared head, and a map for each source head that the projection beside
it absorbs.

A shared value head V and output columns O M_h replace the values V_h and columns O; a shared key head K and query rows
M_h^T Q replace the keys K_h and queries Q. Heads that differ by a linear map merge without loss. Under rotary positions
only maps that commute with the rotation can be absorbed: multiplication by one complex number per frequency.

Shape legend: m K/V heads of a group, r query heads that read each of them, c head_dim, d hidden size, f rotary
frequencies. Everything is float64. A covariance is E[x x^T], [d, d], of the layer's inputs, and defaults to the
identity. In cross-attention, queries and keys have different inputs, and so different covariances and sizes d. A bias
is one more input column, with inputs and covariance extended by a constant 1.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_LEAST = 1e-12
"""The least eigenvalue, relative to the largest: nothing may be divided by the weight of an unread direction."""


def factor(rows: Array, weights: Array, covariance: Array | None = None) -> tuple[Array, Array]:
    """The head of rank c that replaces m heads with the least loss: the truncated decomposition of the weighted,
    stacked heads.

    It minimises the sum over heads of E|L_h (V_h - M_h V) x|^2, where L_h^T L_h is the head's weight. For values, that
    is the difference that the output projection sees; for keys, the one that the queries see.

    Args:
        rows: [..., m, c, d], keys or values; what is in front of m is factored by itself.
        weights: [..., m, c, c], symmetric: how strongly each direction of a head is read.
        covariance: of the inputs.

    Returns:
        The shared head [..., c, d], with the root mean square of the source heads and its strongest row first, and maps
        [..., m, c, c].
    """
    *others, heads, head_dim, inputs = rows.shape
    roots = root(weights)
    weighted = (roots @ rows).reshape(*others, heads * head_dim, inputs)
    gram = times(weighted, covariance) @ adjoint(weighted)
    leading = np.linalg.eigh(gram)[1][..., ::-1][..., :head_dim]
    shared = adjoint(leading) @ weighted
    maps = np.linalg.solve(roots, leading.reshape(*others, heads, head_dim, head_dim))
    before, after = np.mean(np.abs(rows) ** 2, axis=(-3, -2, -1)), np.mean(np.abs(shared) ** 2, axis=(-2, -1))
    is_dead = (before == 0) | (after == 0)
    scale = np.sqrt(np.where(is_dead, 1.0, before) / np.where(is_dead, 1.0, after))[..., None, None]
    return shared * scale, maps / scale[..., None]


def factor_values(
    values: Array, outputs: Array, covariance: Array | None = None, *, weighted: bool = True
) -> tuple[Array, Array]:
    """Merge value heads, which positions do not affect.

    Args:
        values: [m, c, d].
        outputs: [m, r, D, c], the output projection's columns of each query head.
        covariance: of the inputs.
        weighted: whether to weight directions by the columns. Without a covariance, the unweighted decomposition lost
            less on the models that were tried.

    Returns:
        The shared value head [c, d] and new columns [m, r, D, c].
    """
    heads, head_dim, _ = values.shape
    weights = np.tile(np.eye(head_dim), (heads, 1, 1))
    if weighted:
        weights = np.einsum("mrDc,mrDe->mce", outputs, outputs)
    shared, maps = factor(values, weights, covariance)
    return shared, outputs @ maps[:, None]


def factor_keys(
    keys: Array, queries: Array, covariance: Array | None = None, query_covariance: Array | None = None
) -> tuple[Array, Array]:
    """Merge keys without rotary positions, or the rows of a key head that have none.

    Args:
        keys: [m, c, d].
        queries: [m, r, c, d]; d may differ from that of the keys.
        covariance: of the keys' inputs.
        query_covariance: of the queries' inputs.

    Returns:
        The shared key head [c, d] and new query rows [m, r, c, d].
    """
    weights = np.einsum("mrcd,mred->mce", times(queries, query_covariance), queries)
    shared, maps = factor(keys, weights, covariance)
    return shared, adjoint(maps)[:, None] @ queries


def factor_rotary_keys(
    keys: Array, queries: Array, covariance: Array | None = None, query_covariance: Array | None = None
) -> tuple[Array, Array]:
    """Merge keys under rotary positions, frequency by frequency: each is factored by itself, and keeps one direction.

    Args:
        keys: [m, f, d], complex: one row of each pair is the real part, the other the imaginary part.
        queries: [m, r, f, d], complex in the same way.
        covariance: of the keys' inputs, not centred, because the mean key holds the attention sink.
        query_covariance: of the queries' inputs.

    Returns:
        The shared key head [f, d] and new query rows [m, r, f, d], complex.
    """
    powers = np.einsum("mrfd,mrfd->fm", times(queries, query_covariance), queries.conj()).real
    powers = np.maximum(powers, _LEAST * (powers.max() or 1.0))
    shared, maps = factor(keys.swapaxes(0, 1)[:, :, None], powers[:, :, None, None], covariance)
    key, multipliers = shared[:, 0], maps[:, :, 0, 0]
    phase = np.exp(1j * np.angle(multipliers.mean(1, keepdims=True)))  # the mean multiplier becomes real and positive
    return key * phase, np.einsum("fm,mrfd->mrfd", (multipliers / phase).conj(), queries)


def times(rows: Array, matrix: Array | None) -> Array:
    """Rows [..., d], perhaps complex, times a real matrix [d, d]; without one, the rows themselves."""
    if matrix is None:
        return rows
    flat = rows.reshape(-1, rows.shape[-1])
    if np.iscomplexobj(rows):  # numpy would make the matrix complex, with a copy and twice the work
        product = flat.real @ matrix + 1j * (flat.imag @ matrix)
    else:
        product = flat @ matrix
    return np.asarray(product.reshape(rows.shape))


def adjoint(matrix: Array) -> Array:
    """The conjugate transpose of the last two axes."""
    return matrix.conj().swapaxes(-1, -2)


def root(matrix: Array) -> Array:
    """The symmetric positive root of symmetric matrices [..., c, c], in which no eigenvalue is below a small bound."""
    values, vectors = np.linalg.eigh(matrix)
    least = _LEAST * np.maximum(values[..., -1:], _LEAST)
    return np.asarray((vectors * np.sqrt(np.maximum(values, least))[..., None, :]) @ adjoint(vectors))
