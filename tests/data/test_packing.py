"""Causal blocks: every token is predicted once in each epoch, in an order of permutations and
mixtures.
"""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gqa_convert.data.order import mix, permuted
from gqa_convert.data.sampler import IGNORED, CausalSampler, SampleSettings
from gqa_convert.data.samples import EvaluationBlocks, Mixture, Samples
from tests.helpers.data_helpers import array_tokens

SIZES = st.integers(2, 60)
LENGTHS = st.integers(1, 12)


def causal(length: int, window: int = 1) -> CausalSampler:
    sampler = CausalSampler(SampleSettings(None, "causal", length))
    sampler.window_blocks = max(1, window // length)
    return sampler


def samples_of(
    size: int,
    length: int,
    *,
    seed: int = 5,
    window: int | None = None,
    complete: bool = True,
    available: int | None = None,
) -> Samples:
    """Samples of the tokens 2..size + 1, each of which says where it stands; of a stream if
    there is a window.
    """
    tokens = array_tokens(
        np.arange(2, size + 2)[:available],
        is_stream=window is not None,
        complete=complete and available is None,
    )
    return Samples([(tokens, 1.0)], causal(length, window or 1), seed)


@given(size=SIZES, length=LENGTHS, seed=st.integers(0, 2**32))
def test_each_token_but_the_first_is_predicted_once_per_epoch(
    size: int, length: int, seed: int
) -> None:
    samples = samples_of(size, length, seed=seed)
    blocks = -(-size // length)
    assert samples.sampler.count(samples.sources[0]) == blocks
    for epoch in range(3):
        batch = samples.batch(range(epoch * blocks, (epoch + 1) * blocks))
        learnt = batch["labels"] != IGNORED
        assert Counter(batch["labels"][learnt].tolist()) == Counter(range(3, size + 2))
        assert (batch["labels"][learnt] == batch["input_ids"][learnt] + 1).all()


@given(size=SIZES, length=LENGTHS, window=st.integers(1, 80), count=st.integers(1, 60))
def test_a_stream_is_shuffled_within_windows_first(
    size: int, length: int, window: int, count: int
) -> None:
    """What comes later in a stream changes no sample, and no sample needs what is not said to be
    needed.
    """
    blocks = -(-size // length)
    whole = samples_of(size, length, window=window)
    batch = whole.batch(range(blocks))
    assert sorted(batch["labels"][batch["labels"] != IGNORED].tolist()) == list(range(3, size + 2))
    needed = causal(length, window).tokens_for(count)
    if needed >= size:
        return
    partial = samples_of(size, length, window=window, available=needed)
    for index in range(count):
        one, other = partial.batch([index]), whole.batch([index])
        assert all((one[name] == other[name]).all() for name in one)
        place = (one["input_ids"][0, 0] - 2) // length
        assert place // max(1, window // length) == index // max(1, window // length)
    with pytest.raises(IndexError, match="not there yet"):
        partial.batch([-(-needed // length)])


@given(size=SIZES, length=LENGTHS, indices=st.lists(st.integers(0, 10**6), min_size=1, max_size=8))
def test_samples_do_not_depend_on_how_they_are_asked_for(
    size: int, length: int, indices: list[int]
) -> None:
    together = samples_of(size, length).batch(indices)
    samples = samples_of(size, length)
    for row, index in reversed(list(enumerate(indices))):
        alone = samples.batch([index])
        assert all((alone[name][0] == together[name][row]).all() for name in together)


def test_sources_keep_their_share_and_their_own_order() -> None:
    sampler = causal(4)
    sources = [(array_tokens(np.arange(2, 43)), 3.0), (array_tokens(np.arange(1001, 1042)), 1.0)]
    samples = Samples(sources, sampler, 0)
    batch = samples.batch(range(44))
    second = batch["input_ids"][:, 0] > 1000
    assert second.sum() == 11
    labels = batch["labels"][second]
    assert sorted(labels[labels != IGNORED].tolist()) == list(range(1002, 1042))


@given(size=SIZES, length=LENGTHS, tokens=st.integers(1, 80))
def test_evaluation_scores_each_token_once_and_in_order(
    size: int, length: int, tokens: int
) -> None:
    sampler = causal(length)
    blocks = EvaluationBlocks([(array_tokens(np.arange(2, size + 2)), tokens)], sampler)
    if tokens < 2 or size < 2:
        assert not len(blocks)
        return
    labels = blocks.batch(range(len(blocks)))["labels"]
    assert labels.shape == (len(blocks), length)
    assert labels[labels != IGNORED].tolist() == list(range(3, min(size, tokens) + 2))


@given(size=st.integers(1, 700), key=st.integers(0, 2**64 - 1))
def test_every_number_comes_once(size: int, key: int) -> None:
    assert sorted(permuted(number, size, key) for number in range(size)) == list(range(size))


def test_places_are_equally_likely() -> None:
    counts = Counter(permuted(3, 10, mix(key)) for key in range(4000))
    assert set(counts) == set(range(10))
    assert all(320 < count < 480 for count in counts.values())


def test_the_numbers_are_those_of_earlier_versions() -> None:
    """A run that is resumed with another version must find its samples again."""
    assert mix(1, 2, 3) == 0xD0734750FDE362B3
    assert [permuted(number, 10, 42) for number in range(10)] == [4, 2, 3, 9, 8, 5, 0, 1, 6, 7]


@given(
    weights=st.lists(
        st.sampled_from([0.1, 0.25, 0.3, 0.5, 0.7, 1, 2.5, 7, 19]), min_size=1, max_size=6
    )
)
def test_counts_stay_within_one_of_the_weights(weights: list[float]) -> None:
    mixture = Mixture(weights)
    counts = [0] * len(weights)
    for index in range(400):
        source, number = mixture.locate(index)
        assert number == counts[source]
        counts[source] += 1
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - (index + 1) * weight / sum(weights)) < 1 + 1e-9


def test_awkward_weights_are_rounded() -> None:
    weights = [0.123456789, 0.3333333333, 1e-12]
    mixture = Mixture(weights)
    period = sum(mixture.parts)
    assert period <= 65537
    drawn = Counter(mixture.locate(index)[0] for index in range(period))
    assert abs(drawn[0] / 65536 - weights[0] / sum(weights)) < 1e-4
    assert drawn[2] == 1
