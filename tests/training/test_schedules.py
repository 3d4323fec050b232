"""The learning-rate schedules: closed forms, ends, and what holds of all of them."""

import itertools
import math
from typing import get_args

import pytest

from gqa_convert.training.recipe import Schedule, make_recipe
from gqa_convert.training.schedules import factor, learning_rate

SCHEDULES = get_args(Schedule)
RUNS = [(1, 0), (1, 1), (2, 1), (7, 7), (10, 0), (100, 2), (1000, 20), (1000, 999)]


def factors(schedule: Schedule, steps: int, warmup: int, **shape: float) -> list[float]:
    return [factor(schedule, step, steps, warmup, **shape) for step in range(1, steps + 1)]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("steps", "warmup"), RUNS)
def test_warmup_rises_in_a_straight_line_and_nothing_rises_after_it(
    schedule: Schedule, steps: int, warmup: int
) -> None:
    found = factors(schedule, steps, warmup)
    assert found[:warmup] == pytest.approx([step / warmup for step in range(1, warmup + 1)])
    assert all(0 < value <= 1 for value in found)
    assert all(after <= before for before, after in itertools.pairwise(found[max(0, warmup - 1) :]))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_step_jumps(schedule: Schedule) -> None:
    found = factors(schedule, 2000, 100)
    assert max(abs(after - before) for before, after in itertools.pairwise(found)) <= 1 / 100 + 1e-12


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
@pytest.mark.parametrize("final", [0.0, 0.1, 1.0])
@pytest.mark.parametrize(("steps", "warmup"), [(10, 0), (100, 2), (1000, 20), (1000, 999)])
def test_the_last_step_has_the_final_rate(schedule: Schedule, final: float, steps: int, warmup: int) -> None:
    assert factor(schedule, steps, steps, warmup, final=final) == pytest.approx(final, abs=1e-15)


def test_cosine_is_half_a_period() -> None:
    assert factor("cosine", 60, 110, 10, final=0.0) == pytest.approx(0.5)
    assert factor("cosine", 60, 110, 10, final=0.2) == pytest.approx(0.6)
    assert factor("cosine", 35, 110, 10, final=0.0) == pytest.approx((1 + math.sqrt(0.5)) / 2)


def test_wsd_is_stable_and_then_falls_in_a_straight_line() -> None:
    found = factors("wsd", 100, 10, final=0.0, decay_share=0.2)
    assert found[9:80] == [1.0] * 71
    assert found[80:] == pytest.approx([(100 - step) / 20 for step in range(81, 101)])


def test_wsd_keeps_its_warmup_where_the_decay_would_begin_before_its_end() -> None:
    found = factors("wsd", 10, 5, final=0.0, decay_share=1.0)
    assert found == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0])


@pytest.mark.parametrize(("step", "steps", "warmup"), [(0, 10, 0), (11, 10, 0), (1, 10, 11), (1, 10, -1)])
def test_steps_outside_the_run_are_no_steps(step: int, steps: int, warmup: int) -> None:
    with pytest.raises(ValueError, match="warm-up"):
        factor("constant", step, steps, warmup)


def test_the_learning_rate_of_a_recipe() -> None:
    keys = {"model": "m", "output": "o", "data": "d", "tokens": "10M", "learning_rate": 1e-3}
    recipe = make_recipe(keys | {"schedule": "wsd", "final_learning_rate": 0.5, "decay_share": 0.5, "warmup_steps": 10})
    assert learning_rate(recipe, 5, 100) == pytest.approx(5e-4)
    assert learning_rate(recipe, 50, 100) == pytest.approx(1e-3)
    assert learning_rate(recipe, 75, 100) == pytest.approx(7.5e-4)
    assert learning_rate(recipe, 100, 100) == pytest.approx(5e-4)
    assert learning_rate(make_recipe(keys | {"schedule": "constant"}), 1, 1000) == pytest.approx(1e-3 / 20)
