"""Order of samples: permutations, and mixtures of sources."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gqa_convert.data.order import Mixture, mix, permuted


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


@given(weights=st.lists(st.sampled_from([0.1, 0.25, 0.3, 0.5, 0.7, 1, 2.5, 7, 19]), min_size=1, max_size=6))
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
    assert mixture.period <= 65537
    drawn = Counter(mixture.locate(index)[0] for index in range(mixture.period))
    assert abs(drawn[0] / 65536 - weights[0] / sum(weights)) < 1e-4
    assert drawn[2] == 1
