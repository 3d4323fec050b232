"""What differs by maps alone merges without loss, and every other merge loses the least that is possible."""

from typing import Any

import numpy as np
import pytest

from gqa_convert.merging.factorisation import factor_keys, factor_rotary_keys, factor_values

Array = np.ndarray[Any, Any]
M, R, C, D, QUERY_INPUTS = 3, 2, 5, 14, 16


def covariance(rng: np.random.Generator, size: int = D) -> Array:
    samples = rng.standard_normal((50, size)) * rng.uniform(0.2, 3, size)
    return np.asarray(samples.T @ samples / 50)


def complex_numbers(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape) + 1j * rng.standard_normal(shape)


def rms(array: Array, axis: tuple[int, ...] | int | None = None) -> Array:
    return np.sqrt(np.mean(np.abs(array) ** 2, axis=axis))


def test_values_lose_what_a_truncated_decomposition_drops(rng: np.random.Generator) -> None:
    """Eckart and Young: the singular values from the c-th on of the stacked heads, as text shows them."""
    known = covariance(rng)
    values, outputs = rng.standard_normal((M, C, D)), rng.standard_normal((M, R, D, C))
    shared, columns = factor_values(values, outputs, known)
    lost = (columns @ shared - outputs @ values[:, None]) @ np.linalg.cholesky(known)
    stacked = (outputs @ values[:, None]).reshape(-1, D) @ np.linalg.cholesky(known)
    dropped = np.linalg.svd(stacked, compute_uv=False)[C:]
    assert np.sum(lost**2) == pytest.approx(np.sum(dropped**2), rel=1e-9)
    assert rms(shared) == pytest.approx(rms(values))


def test_keys_lose_what_a_truncated_decomposition_drops(rng: np.random.Generator) -> None:
    """Of the scores, with other inputs for queries than for keys, as in cross-attention."""
    known, asked = covariance(rng), covariance(rng, QUERY_INPUTS)
    keys, queries = rng.standard_normal((M, C, D)), rng.standard_normal((M, R, C, QUERY_INPUTS))
    shared, readers = factor_keys(keys, queries, known, asked)
    left, right = np.linalg.cholesky(asked).T, np.linalg.cholesky(known)
    scores = left @ queries.swapaxes(2, 3) @ keys[:, None] @ right
    lost = left @ readers.swapaxes(2, 3) @ shared @ right - scores
    dropped = np.linalg.svd(scores.reshape(-1, D), compute_uv=False)[C:]
    assert np.sum(lost**2) == pytest.approx(np.sum(dropped**2), rel=1e-9)
    assert np.all(np.diff(rms(shared @ right, axis=1)) < 0)


def test_rotary_keys_lose_what_each_frequency_drops(rng: np.random.Generator) -> None:
    known, asked = covariance(rng), covariance(rng, QUERY_INPUTS)
    keys, queries = complex_numbers(rng, M, C, D), complex_numbers(rng, M, R, C, QUERY_INPUTS)
    shared, readers = factor_rotary_keys(keys, queries, known, asked)
    left, right = np.linalg.cholesky(asked), np.linalg.cholesky(known)
    assert np.allclose(rms(shared, axis=1), rms(keys, axis=(0, 2)))
    for pair in range(C):
        scores = np.einsum("mre,md->mred", queries[:, :, pair] @ left, (keys[:, pair] @ right).conj())
        merged = np.einsum("mre,d->mred", readers[:, :, pair] @ left, (shared[pair] @ right).conj())
        dropped = np.linalg.svd(scores.reshape(-1, D), compute_uv=False)[1:]
        assert np.sum(np.abs(scores - merged) ** 2) == pytest.approx(np.sum(dropped**2), rel=1e-9)


def test_dead_heads_do_no_harm(rng: np.random.Generator) -> None:
    """A head that nothing reads, and one that says nothing, leave finite numbers and an exact merge of the third."""
    values, outputs = rng.standard_normal((M, C, D)), rng.standard_normal((M, R, D, C))
    outputs[0], values[1] = 0, 0
    shared, columns = factor_values(values, outputs)
    assert np.isfinite(shared).all()
    assert np.allclose(columns @ shared, outputs @ values[:, None], atol=1e-4)
    keys, queries = values.astype(complex), complex_numbers(rng, M, R, C, D)
    queries[0] = 0
    for array in factor_rotary_keys(keys, queries):
        assert np.isfinite(array).all()
