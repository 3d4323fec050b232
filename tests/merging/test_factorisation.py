"""What differs by maps alone merges without loss, and every other merge loses the least that is
possible.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gqa_convert.merging.factorisation import Channels, factor

Array = np.ndarray[Any, Any]
HEADS, GROUPS, READERS, ROWS, INPUTS, READER_INPUTS = 6, 2, 2, 5, 19, 16


def covariance(rng: np.random.Generator, size: int) -> Array:
    samples = rng.standard_normal((50, size)) * rng.uniform(0.2, 3, size)
    return np.asarray(samples.T @ samples / 50)


def random_channels(rng: np.random.Generator, *places: int) -> Channels:
    """Real ones, or complex ones with a single row at each of some places."""
    rows = rng.standard_normal((*places, HEADS, ROWS, INPUTS))
    readers = rng.standard_normal((*places, HEADS, READERS, ROWS, READER_INPUTS))
    if places:
        rows, readers = (
            rows[..., :1, :] + 1j * rows[..., 1:2, :],
            readers[..., :1, :] + 1j * readers[..., 1:2, :],
        )
    return Channels(rows, readers, covariance(rng, INPUTS), covariance(rng, READER_INPUTS))


def products(readers: Array, rows: Array, channels: Channels) -> Array:
    """Of each group at each place, what readers make of rows, in units in which all directions
    count alike.
    """
    left = readers.conj().swapaxes(-1, -2)
    if channels.reader_covariance is not None:
        left = np.linalg.cholesky(channels.reader_covariance).T @ left
    right = rows if channels.covariance is None else rows @ np.linalg.cholesky(channels.covariance)
    found = left @ right.repeat(HEADS // rows.shape[-3], axis=-3)[..., None, :, :]
    return found.reshape(*rows.shape[:-3], GROUPS, -1, INPUTS)


@pytest.mark.parametrize("places", [(), (3,)])
def test_a_merge_loses_what_a_truncated_decomposition_drops(
    rng: np.random.Generator, places: tuple[int, ...]
) -> None:
    """Eckart and Young: the singular values from the c-th on of all that the readers of a group
    make of its rows.
    """
    channels = random_channels(rng, *places)
    shared, readers = factor(channels, GROUPS)
    before = products(channels.readers, channels.rows, channels)
    lost = before - products(readers, shared, channels)
    dropped = np.linalg.svd(before, compute_uv=False)[..., channels.rows.shape[-2] :]
    np.testing.assert_allclose(
        np.sum(np.abs(lost) ** 2, axis=(-2, -1)), np.sum(dropped**2, axis=-1)
    )
    sizes = np.linalg.norm(channels.rows.reshape(*places, GROUPS, -1, INPUTS), axis=(-2, -1)) ** 2
    np.testing.assert_allclose(
        np.linalg.norm(shared, axis=(-2, -1)) ** 2, sizes / (HEADS // GROUPS)
    )
    assert channels.covariance is not None
    strengths = np.linalg.norm(shared @ np.linalg.cholesky(channels.covariance), axis=-1)
    assert np.all(np.diff(strengths) < 0), "the strongest row comes first"


def test_complex_multipliers_are_real_and_positive_in_the_mean(rng: np.random.Generator) -> None:
    channels = random_channels(rng, 3)
    _, readers = factor(channels, GROUPS)
    multipliers = (readers / channels.readers)[..., 0, 0, 0]
    mean = multipliers.reshape(3, GROUPS, -1).mean(-1)
    assert np.all(mean.real > 0)
    np.testing.assert_allclose(mean.imag, 0, atol=1e-12)


@pytest.mark.parametrize("places", [(), (3,)])
def test_heads_that_are_images_of_one_merge_without_loss(
    rng: np.random.Generator, places: tuple[int, ...]
) -> None:
    channels = random_channels(rng, *places)
    own = channels.rows.shape[-2]
    maps: Array = rng.standard_normal((*places, HEADS, own, own))
    if places:
        maps = maps + 1j * rng.standard_normal(maps.shape)
    channels = replace(channels, rows=maps @ channels.rows[..., :1, :, :])
    shared, readers = factor(channels, GROUPS)
    found, expected = (
        products(readers, shared, channels),
        products(channels.readers, channels.rows, channels),
    )
    np.testing.assert_allclose(found, expected, atol=1e-6 * float(np.abs(expected).max()))


@pytest.mark.parametrize("places", [(), (3,)])
def test_dead_heads_do_no_harm(rng: np.random.Generator, places: tuple[int, ...]) -> None:
    """A head that nothing reads, and one that says nothing, leave finite numbers and an exact
    merge of the third.
    """
    channels = random_channels(rng, *places)
    channels.readers[..., 0, :, :, :] = 0
    channels.rows[..., 1, :, :] = 0
    channels.rows[..., 3:, :, :] = 0
    shared, readers = factor(channels, GROUPS)
    assert np.isfinite(shared).all()
    found, expected = (
        products(readers, shared, channels),
        products(channels.readers, channels.rows, channels),
    )
    np.testing.assert_allclose(found, expected, atol=1e-4)
