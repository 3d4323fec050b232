"""The learning-rate schedules: closed forms and ends."""

import itertools
import math
from typing import Any

import pytest

from gqa_convert.training.recipe import Schedule, make_recipe
from gqa_convert.training.schedules import learning_rate


def shares(schedule: Schedule, steps: int, warmup: int, **keys: Any) -> list[float]:
    """The learning rates of all steps, where the peak is 1."""
    stated = {"model": "m", "output": "o", "data": "d", "tokens": "10M", "learning_rate": 1, "schedule": schedule}
    recipe = make_recipe(stated | {"warmup_steps": warmup} | keys)
    return [learning_rate(recipe, step, steps) for step in range(1, steps + 1)]


@pytest.mark.parametrize("schedule", ["constant", "cosine", "wsd"])
@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 1), (2, 1), (7, 7), (10, 0), (100, 2), (1000, 999)])
def test_warmup_rises_in_a_straight_line_and_nothing_rises_after_it(
    schedule: Schedule, steps: int, warmup: int
) -> None:
    found = shares(schedule, steps, warmup)
    assert found[:warmup] == pytest.approx([step / warmup for step in range(1, warmup + 1)])
    assert all(0 < value <= 1 for value in found)
    assert all(after <= before for before, after in itertools.pairwise(found[max(0, warmup - 1) :]))
    if warmup < steps and schedule != "constant":
        assert shares(schedule, steps, warmup, final_learning_rate=0.2)[-1] == pytest.approx(0.2)


def test_cosine_is_half_a_period_and_wsd_falls_in_a_straight_line_at_the_end() -> None:
    assert shares("cosine", 110, 10, final_learning_rate=0.2)[59] == pytest.approx(0.6)
    assert shares("cosine", 110, 10, final_learning_rate=0)[34] == pytest.approx((1 + math.sqrt(0.5)) / 2)
    found = shares("wsd", 100, 10, final_learning_rate=0, decay_share=0.2)
    assert found[9:80] == [1.0] * 71
    assert found[80:] == pytest.approx([(100 - step) / 20 for step in range(81, 101)])
    assert shares("constant", 1000, 0, learning_rate=1e-3)[-1] == 1e-3
