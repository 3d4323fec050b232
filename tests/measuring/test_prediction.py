"""The arithmetic that turns divergences of short fits into a predicted loss."""

import math

import pytest

from gqa_convert.conversion.fit.whole_model import WORTHWHILE
from gqa_convert.measuring.inspect.prediction import FURTHER_GAIN, LAST_STAGE_FACTOR, MOST_GAIN, Divergences, predict
from gqa_convert.measuring.inspect.quick_fit import sampled_layers


def divergences(
    merged: dict[int, float], fitted: dict[int, float], single: list[float], sampled: list[int]
) -> Divergences:
    """With the same divergence on every one of 16 blocks."""
    return Divergences(
        merged={groups: [value] * 16 for groups, value in merged.items()},
        fitted={groups: [value] * 16 for groups, value in fitted.items()},
        single=single,
        sampled=sampled,
    )


def after(closed_form: float, short: float) -> float:
    """The prediction without the last stage."""
    return closed_form * (short / closed_form) ** (1 + FURTHER_GAIN)


def test_short_fits_are_scaled_to_all_layers() -> None:
    """The sampled layers are a quarter of all by number, and half of all by what single layers lose."""
    found = divergences({1: 0.5, 2: 0.1}, {1: 0.1, 2: 0.01}, [0.01, 0.03, 0.01, 0.01], [1])
    predicted = predict(found, last_stage=False)
    assert predicted[1].increase == pytest.approx(after(0.5, 0.2))
    assert predicted[2].increase == pytest.approx(after(0.1, 0.02))
    by_number = predict(divergences({1: 0.5}, {1: 0.1}, [0.0] * 4, [1]), last_stage=False)
    assert by_number[1].increase == pytest.approx(after(0.5, 0.4))


def test_the_last_stage_lowers_what_is_worth_its_time() -> None:
    found = divergences({1: 0.5, 6: 0.99 * WORTHWHILE}, {1: 0.2, 6: 0.99 * WORTHWHILE}, [0.1], [0])
    without, with_it = (predict(found, last_stage=last_stage) for last_stage in (False, True))
    assert with_it[1].increase == pytest.approx(LAST_STAGE_FACTOR * without[1].increase)
    assert with_it[6] == without[6]


def test_nothing_is_lost_where_the_closed_form_loses_nothing() -> None:
    """Heads that are tied in groups of N = 4 and 2; numbers without short fits take the share of their neighbours."""
    found = divergences({1: 0.5, 2: 1e-9, 4: 0.0}, {1: 0.1, 4: 0.0}, [0.0, 0.0], [0, 1])
    predicted = predict(found, last_stage=True)
    assert predicted[2].high < 1e-8
    assert predicted[4].high == 0
    assert predicted[1].low > 0.01
    never_more = predict(divergences({2: 0.1}, {2: 0.3}, [0.1, 0.1], [0]), last_stage=False)
    assert never_more[2].increase == pytest.approx(0.1)


def test_further_gains_have_a_limit() -> None:
    found = divergences({1: 5.0}, {1: 0.01}, [0.1], [0])
    assert predict(found, last_stage=False)[1].increase == pytest.approx(MOST_GAIN * 0.01)


def test_shares_between_are_interpolated() -> None:
    """N = 4 lies in the middle of 2 and 8, and 16 beyond both."""
    found = divergences({2: 1.0, 4: 0.5, 8: 0.25, 16: 0.125}, {2: 0.4, 8: 0.025}, [0.1], [0])
    predicted = predict(found, last_stage=False)
    assert predicted[4].increase == pytest.approx(after(0.5, 0.5 * math.sqrt(0.4 * 0.1)))
    assert predicted[16].increase == pytest.approx(after(0.125, 0.0125))


def test_the_interval_is_wider_on_few_blocks_that_differ() -> None:
    alike = predict(divergences({1: 0.5}, {1: 0.1}, [0.1], [0]), last_stage=False)[1]
    assert alike.low is not None
    assert alike.high is not None
    assert alike.increase is not None
    assert alike.low < alike.increase < alike.high
    assert alike.increase / alike.low == pytest.approx(alike.high / alike.increase)
    for blocks in ([0.1], [0.05, 0.15]):
        few = predict(Divergences({1: [0.5]}, {1: blocks}, [0.1], [0]), last_stage=False)[1]
        assert few.increase == pytest.approx(alike.increase)
        assert few.high is not None
        assert few.high > 1.1 * alike.high


def test_what_is_not_finite_is_not_predicted() -> None:
    found = divergences({1: math.nan, 2: math.inf, 4: 0.1}, {1: 0.1, 4: 0.05}, [math.nan, 0.1], [0])
    predicted = predict(found, last_stage=True)
    assert list(predicted) == [4]
    assert predicted[4].increase == pytest.approx(LAST_STAGE_FACTOR * 0.1)


@pytest.mark.parametrize(
    ("layers", "expected"), [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (5, [0, 2, 4]), (32, [5, 16, 26])]
)
def test_sampled_layers_are_spread_over_the_depth(layers: int, expected: list[int]) -> None:
    assert sampled_layers(layers) == expected
