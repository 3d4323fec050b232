"""Merging by factorisation: what must cost nothing does, and what it costs is the least that is
possible.
"""

from typing import Any

import numpy as np
import pytest

from gqa_convert.merging.factorisation import factor_keys, factor_rotary_keys, factor_values
from gqa_convert.merging.low_frequency import factor_partly_rotary_keys

M, R, C, D = 3, 2, 5, 14


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def covariance(rng: np.random.Generator) -> np.ndarray[Any, Any]:
    samples = rng.standard_normal((50, D)) * rng.uniform(0.2, 3, D)
    return samples.T @ samples / 50


def products(outputs: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What every query head makes of an input: [m, r, D, d]."""
    return outputs @ (values[:, None] if values.ndim == 3 else values)


@pytest.mark.parametrize("measured", [False, True])
def test_heads_that_differ_by_a_map_merge_without_loss(rng: np.random.Generator, measured: bool) -> None:
    known = covariance(rng) if measured else None
    base, maps = rng.standard_normal((C, D)), rng.standard_normal((M, C, C))
    rows, others = maps @ base, rng.standard_normal((M, R, D, C))
    shared, columns = factor_values(rows, others, known)
    assert np.allclose(products(columns, shared), products(others, rows))
    queries = rng.standard_normal((M, R, C, D))
    key, asked = factor_keys(rows, queries, known)
    before = np.einsum("mrce,mcd->mred", queries, rows)
    assert np.allclose(np.einsum("mrce,cd->mred", asked, key), before)


@pytest.mark.parametrize("measured", [False, True])
def test_rotary_heads_that_differ_by_a_complex_number_merge_without_loss(
    rng: np.random.Generator, measured: bool
) -> None:
    known = covariance(rng) if measured else None

    def numbers(*shape: int) -> np.ndarray[Any, Any]:
        return rng.standard_normal(shape) + 1j * rng.standard_normal(shape)

    base, factors, queries = numbers(C, D), numbers(M, C), numbers(M, R, C, D)
    keys = factors[:, :, None] * base
    key, asked = factor_rotary_keys(keys, queries, known)
    before = np.einsum(
        "mrfe,mfd->mrfed", queries, keys.conj()
    )  # the score of a pair is the real part of query times conjugate key
    assert np.allclose(np.einsum("mrfe,fd->mrfed", asked, key.conj()), before)
    assert np.allclose((np.abs(keys) ** 2).mean(axis=(0, 2)), (np.abs(key) ** 2).mean(axis=1))


def test_values_are_the_best_of_their_rank(rng: np.random.Generator) -> None:
    """The error is that of the truncated singular values of the stacked, weighed heads, and no other shared head has
    less.
    """
    known = covariance(rng)
    values, outputs = rng.standard_normal((M, C, D)), rng.standard_normal((M, 1, D, C))
    shared, columns = factor_values(values, outputs, known)

    def error(shared: np.ndarray[Any, Any], columns: np.ndarray[Any, Any]) -> float:
        difference = products(columns, shared) - products(outputs, values)
        return float(np.einsum("mrDd,de,mrDe->", difference, known, difference))

    stacked = (outputs[:, 0] @ values).reshape(M * D, D)
    spectrum = np.linalg.svd(stacked @ np.linalg.cholesky(known), compute_uv=False) ** 2
    assert error(shared, columns) == pytest.approx(spectrum[C:].sum(), rel=1e-9)
    for _ in range(20):
        nearby = shared + 0.05 * rng.standard_normal(shared.shape)
        best = outputs @ values[:, None] @ known @ nearby.T @ np.linalg.inv(nearby @ known @ nearby.T)
        assert error(nearby, best) > error(shared, columns)
    assert np.sqrt(np.mean(shared**2)) == pytest.approx(np.sqrt(np.mean(values**2)))


def test_a_covariance_that_is_known_helps(rng: np.random.Generator) -> None:
    known = covariance(rng)
    values, outputs = rng.standard_normal((M, C, D)), rng.standard_normal((M, R, D, C))
    errors = []
    for given in (None, known):
        shared, columns = factor_values(values, outputs, given)
        difference = products(columns, shared) - products(outputs, values)
        errors.append(np.einsum("mrDd,de,mrDe->", difference, known, difference))
    assert errors[1] < errors[0]


def test_dead_heads_do_no_harm(rng: np.random.Generator) -> None:
    """A head that nothing reads, and one that says nothing, leave finite numbers and an exact merge of the third."""
    values, outputs = rng.standard_normal((M, C, D)), rng.standard_normal((M, R, D, C))
    outputs[0], values[1] = 0, 0
    shared, columns = factor_values(values, outputs)
    assert np.isfinite(shared).all()
    assert np.isfinite(columns).all()
    assert np.allclose(products(columns, shared), products(outputs, values), atol=1e-4)
    keys, queries = values.astype(complex), rng.standard_normal((M, R, C, D)).astype(complex)
    queries[0] = 0
    key, asked = factor_rotary_keys(keys, queries)
    assert np.isfinite(key).all()
    assert np.isfinite(asked).all()


def complex_numbers(rng: np.random.Generator, *shape: int) -> np.ndarray[Any, Any]:
    return rng.standard_normal(shape) + 1j * rng.standard_normal(shape)


def score(query: np.ndarray[Any, Any], key: np.ndarray[Any, Any], turns: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Scores [m, r] of query and key channels [..., f] at a distance that turns each frequency by so much."""
    return np.asarray(np.real(np.sum(query * np.exp(1j * turns) * key.conj(), axis=-1)))


@pytest.mark.parametrize("start", [0, 2, C])
@pytest.mark.parametrize("plain", [0, 3])
def test_low_frequencies_merge_as_one_block(rng: np.random.Generator, start: int, plain: int) -> None:
    """High frequencies that differ by complex numbers and low ones that differ by any real map: exact where the low
    ones do not rotate.

    Queries are made of other, wider inputs than keys, as in cross-attention.
    """
    low = plain + 2 * (C - start)
    base, rows = complex_numbers(rng, C, D), rng.standard_normal((low, D))
    maps = rng.standard_normal((M, low, low))
    joint = maps @ rows
    half = (low - plain) // 2
    keys = np.concatenate(
        [
            complex_numbers(rng, M, start, 1) * base[:start],
            joint[:, plain : plain + half] + 1j * joint[:, plain + half :],
        ],
        axis=1,
    )
    queries, plain_queries = complex_numbers(rng, M, R, C, D + 2), rng.standard_normal((M, R, plain, D + 2))
    samples = rng.standard_normal((60, D + 2))
    key, rest, asked, reading = factor_partly_rotary_keys(
        (keys, joint[:, :plain]), (queries, plain_queries), start, covariance(rng), samples.T @ samples / 60
    )
    assert key.shape == (C, D)
    assert rest.shape == (plain, D)
    asking, seen = rng.standard_normal(D + 2), rng.standard_normal(D)
    turns = np.where(np.arange(C) < start, rng.uniform(0, 6, C), 0)
    before = score(queries @ asking, (keys @ seen)[:, None], turns) + np.einsum(
        "mrs,ms->mr", plain_queries @ asking, joint[:, :plain] @ seen
    )
    assert np.allclose(score(asked @ asking, key @ seen, turns) + (reading @ asking) @ (rest @ seen), before)


def low_frequency_merge(keys: Any, queries: Any, start: int, known: Any) -> tuple[Any, Any]:
    """A merge in which every row is rotary."""
    none = np.empty((M, 0, D)), np.empty((M, R, 0, D))
    key, _, asked, _ = factor_partly_rotary_keys((keys, none[0]), (queries, none[1]), start, known)
    return key, asked


def test_without_low_frequencies_it_is_the_rotary_merge(rng: np.random.Generator) -> None:
    known, keys, queries = covariance(rng), complex_numbers(rng, M, C, D), complex_numbers(rng, M, R, C, D)
    for one, other in zip(
        low_frequency_merge(keys, queries, C, known), factor_rotary_keys(keys, queries, known), strict=True
    ):
        assert np.array_equal(one, other)


def test_the_strongest_direction_has_the_lowest_frequency(rng: np.random.Generator) -> None:
    keys, queries = complex_numbers(rng, M, C, D), complex_numbers(rng, M, R, C, D)
    key, asked = low_frequency_merge(keys, queries, 2, None)
    power = np.sum(np.abs(key) ** 2, axis=1) * np.sum(np.abs(asked) ** 2, axis=(0, 1, 3))
    assert np.all(np.diff(power[2:]) > 0)


def test_queries_of_other_inputs_decide_what_is_kept(rng: np.random.Generator) -> None:
    """The shared key is the best for the scores of the queries' own inputs: no other has less error."""
    known, samples = covariance(rng), rng.standard_normal((60, D + 2)) * rng.uniform(0.1, 4, D + 2)
    asking = samples.T @ samples / 60
    keys, queries = rng.standard_normal((M, C, D)), rng.standard_normal((M, R, C, D + 2))

    def error(given: np.ndarray[Any, Any]) -> float:
        key, asked = factor_keys(keys, queries, known, given)
        difference = np.einsum("mrce,cd->mred", asked, key) - np.einsum("mrce,mcd->mred", queries, keys)
        return float(np.einsum("mred,df,mrgf,eg->", difference, known, difference, asking, optimize=True))

    best = error(asking)
    assert all(error(asking + 3 * np.outer(other, other)) > best for other in rng.standard_normal((5, D + 2)))
