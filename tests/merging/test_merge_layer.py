"""Merging the heads of a layer: what it loses, against sums over every pair of inputs at every
distance.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gqa_convert.merging.absorption_limits import AbsorptionLimits
from gqa_convert.merging.attention_heads import Heads
from gqa_convert.merging.merge_layer import Moments, key_trials, merge_layer
from tests.helpers.random_heads import random_heads, reconstruction_errors

Array = np.ndarray[Any, Any]
K, R, HEAD_DIM, VALUE_DIM, INPUTS, QUERY_INPUTS, OUTPUTS = 6, 2, 10, 7, 23, 19, 9
PAIRS = np.array([[0, 1, 2], [3, 4, 5]])
"""Of the ten dimensions of a key head, six are rotary."""
FREQUENCIES = 2 * np.pi / 16 * np.array([1, 2, 5])
"""No two of them, nor their sums, are alike over 16 distances."""
LIMITS = AbsorptionLimits(PAIRS)
SIZES = {"head_dim": HEAD_DIM, "value_dim": VALUE_DIM, "inputs": INPUTS, "outputs": OUTPUTS}


def samples(rng: np.random.Generator, inputs: int) -> Array:
    """[n, inputs], with the constant input of biases."""
    found = rng.standard_normal((31, inputs)) * rng.uniform(0.1, 3, inputs) + 0.5
    found[:, -1] = 1
    return found


def moment(rows: Array) -> Array:
    return np.asarray(rows.T @ rows / len(rows))


def scores_at(query: Array, key: Array, pairs: Array, asking: Array, seen: Array) -> Array:
    """[distances, queries, keys] of a query head and a key head; keys without positions lose
    their mean.
    """
    plain = np.setdiff1d(np.arange(len(key)), pairs)
    real, imaginary = pairs
    x, y = asking @ query.T, seen @ key.T
    still = x[:, plain] @ (y[:, plain] - y[:, plain].mean(0)).T
    found = []
    for distance in range(16):
        turned = (x[:, real] + 1j * x[:, imaginary]) * np.exp(
            1j * distance * FREQUENCIES[: len(real)]
        )
        found.append((turned @ (y[:, real] - 1j * y[:, imaginary]).T).real + still)
    return np.stack(found)


def summed_errors(
    source: Heads, merged: Heads, pairs: Array, asking: Array, seen: Array
) -> tuple[float, float]:
    """One by one, over every query head."""
    lost, total = np.zeros(2), np.zeros(2)
    for head in range(source.kv_heads):
        group = head * merged.kv_heads // source.kv_heads
        for number in range(R):
            before = scores_at(source.queries[head, number], source.keys[head], pairs, asking, seen)
            after = scores_at(merged.queries[head, number], merged.keys[group], pairs, asking, seen)
            output = source.outputs[head, number] @ source.values[head] @ seen.T
            new_output = merged.outputs[head, number] @ merged.values[group] @ seen.T
            lost += np.sum((before - after) ** 2), np.sum((output - new_output) ** 2)
            total += np.sum(before**2), np.sum(output**2)
    keys, values = np.sqrt(lost / total)
    return float(keys), float(values)


@pytest.mark.parametrize("pairs", [PAIRS, PAIRS[:, :0]])
@pytest.mark.parametrize("query_inputs", [INPUTS, QUERY_INPUTS])
def test_errors_are_those_of_the_scores(
    rng: np.random.Generator, query_inputs: int, pairs: Array
) -> None:
    source, limits = (
        random_heads(rng, K, R, **SIZES, query_inputs=query_inputs),
        AbsorptionLimits(pairs),
    )
    asking, seen = samples(rng, query_inputs), samples(rng, INPUTS)
    moments = Moments(moment(asking), moment(seen))
    merged = merge_layer(source, 2, limits, moments)
    found = reconstruction_errors(source, merged, limits, moments)
    assert found == pytest.approx(summed_errors(source, merged, pairs, asking, seen), rel=1e-9)
    mean = merge_layer(
        source, 2, replace(limits, key_constraint="x", value_constraint="x"), moments
    )
    of_mean = reconstruction_errors(source, mean, limits, moments)
    assert merge_layer(source, K, limits, moments) is source
    assert reconstruction_errors(source, source, limits, moments) == (0.0, 0.0)
    assert found[0] < of_mean[0]
    assert found[1] < of_mean[1]


def test_keys_without_positions_lose_the_least_of_centred_inputs(rng: np.random.Generator) -> None:
    """A truncated decomposition of all scores, of which each query's mean has no effect."""
    source, limits = random_heads(rng, K, R, **SIZES), AbsorptionLimits(PAIRS[:, :0])
    asking, seen = samples(rng, INPUTS), samples(rng, INPUTS) + 5
    moments = Moments(moment(asking), moment(seen))
    found, _ = reconstruction_errors(
        source, merge_layer(source, 1, limits, moments), limits, moments
    )
    scores = asking @ source.queries.swapaxes(2, 3) @ source.keys[:, None] @ (seen - seen.mean(0)).T
    strengths = np.linalg.svd(scores.reshape(-1, len(seen)), compute_uv=False)
    assert found == pytest.approx(np.linalg.norm(strengths[HEAD_DIM:]) / np.linalg.norm(strengths))


def test_without_moments_values_are_decomposed_unweighted(rng: np.random.Generator) -> None:
    source = random_heads(rng, K, R, **SIZES)
    [value] = merge_layer(source, 1, LIMITS, Moments()).values
    rows = source.values.reshape(-1, INPUTS)
    lost = rows - rows @ np.linalg.pinv(value) @ value
    strengths = np.linalg.svd(rows, compute_uv=False)
    assert np.linalg.norm(lost) == pytest.approx(np.linalg.norm(strengths[VALUE_DIM:]))


@pytest.mark.parametrize("first_low", [0, 1, 3])
def test_low_frequencies_merge_with_the_rows_without_positions(
    rng: np.random.Generator, first_low: int
) -> None:
    """High frequencies that differ by complex numbers, and all other rows by any real map: exact
    at distance 0.
    """
    heads = random_heads(rng, K, R, **SIZES, query_inputs=QUERY_INPUTS)
    asking, seen = samples(rng, QUERY_INPUTS), samples(rng, INPUTS)
    real, imaginary = PAIRS[:, :first_low]
    block = np.setdiff1d(np.arange(HEAD_DIM), PAIRS[:, :first_low])
    keys = np.empty_like(heads.keys)
    factors = rng.standard_normal((K, first_low, 1)) + 1j * rng.standard_normal((K, first_low, 1))
    turned = factors * (heads.keys[0, real] + 1j * heads.keys[0, imaginary])
    keys[:, real], keys[:, imaginary] = turned.real, turned.imag
    keys[:, block] = rng.standard_normal((K, len(block), len(block))) @ heads.keys[0, block]
    heads = replace(heads, keys=keys)
    merged = merge_layer(heads, 1, LIMITS, Moments(moment(asking), moment(seen)), first_low)
    for head in range(K):
        for before, after in zip(heads.queries[head], merged.queries[head], strict=True):
            expected = (asking @ before.T) @ (keys[head] @ seen.T)
            scores = (asking @ after.T) @ (merged.keys[0] @ seen.T)
            assert np.allclose(
                scores - scores.mean(1)[:, None], expected - expected.mean(1)[:, None]
            )


def test_the_strongest_direction_has_the_lowest_frequency(rng: np.random.Generator) -> None:
    heads = random_heads(rng, K, R, **SIZES)
    merged = merge_layer(heads, 1, LIMITS, Moments(), 0)
    strength = np.sum(merged.keys[0] ** 2, axis=1)
    plain = strength[6:]
    low = strength[PAIRS[:, ::-1]].T.reshape(-1)
    assert np.all(np.diff([*plain, *low]) < 0)
    rotary = merge_layer(heads, 1, LIMITS, Moments(), 3)
    assert np.array_equal(rotary.keys, merge_layer(heads, 1, LIMITS, Moments()).keys)


@pytest.mark.parametrize("first_low", [0, 1, 2])
def test_trials_make_the_scores_of_the_merge(rng: np.random.Generator, first_low: int) -> None:
    """Although they are merged in a small space; with two heads alike, of which a root is
    singular.
    """
    heads = random_heads(rng, K, R, **SIZES, query_inputs=QUERY_INPUTS)
    heads.keys[1] = 2 * heads.keys[0]
    moments = Moments(moment(samples(rng, QUERY_INPUTS)), moment(samples(rng, INPUTS)))
    trial = key_trials(heads, 2, LIMITS, moments)(first_low)
    merged = merge_layer(heads, 2, replace(LIMITS, value_constraint="x"), moments, first_low)
    scores, expected = (
        found.queries.swapaxes(2, 3) @ found.keys.repeat(K // 2, axis=0)[:, None]
        for found in (trial, merged)
    )
    np.testing.assert_allclose(scores, expected, atol=1e-4 * float(np.abs(expected).max()))
    assert trial.values is heads.values
