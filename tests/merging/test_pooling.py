"""Merging is what it says, to the last bit."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from gqa_convert.checkpoint.dtypes import STORED
from gqa_convert.checkpoint.headers import ITEM_BYTES
from gqa_convert.errors import NonFiniteError
from gqa_convert.merging import pooling
from gqa_convert.merging.methods import Pooling
from gqa_convert.merging.pooling import pool_groups


def merged(heads: np.ndarray, method: Pooling = "mean") -> np.ndarray:
    """All heads as one."""
    return pool_groups(heads, 1, method, heads.dtype, "x")[0][0]


@pytest.mark.parametrize("name", sorted(ITEM_BYTES))
@pytest.mark.parametrize("heads", [3, 12])
def test_the_mean_is_the_exact_mean_to_within_a_rounding(name: str, heads: int) -> None:
    dtype = STORED[name]
    blocks = np.random.default_rng(heads).standard_normal((heads, 50)).astype(dtype)
    ours = merged(blocks)
    assert ours.dtype == dtype
    for column in range(50):
        exact = sum((Fraction(float(value)) for value in blocks[:, column]), Fraction(0)) / heads
        largest = max(abs(float(value)) for value in blocks[:, column])
        rounding = (
            abs(exact) * Fraction(float(ml_dtypes.finfo(dtype).eps)) / 2
        )  # of the result, to nearest
        summing = (
            heads * Fraction(largest) * Fraction(2.0**-52 if dtype.itemsize >= 4 else 2.0**-23)
        )
        assert abs(Fraction(float(ours[column])) - exact) <= rounding + summing


def test_float32_sums_are_kept_in_float64_and_those_of_halves_in_float32() -> None:
    heads = np.array([[1e8], [1.0], [-1e8], [1.0]], np.float32)
    assert merged(heads)[0] == np.float32(0.5)
    assert merged(np.full((4, 3), 65504, np.float16)).tolist() == [65504.0] * 3, (
        "halves near their largest"
    )
    assert pool_groups(heads[:2], 1, "mean", STORED["BF16"], "x")[0].dtype == STORED["BF16"]


def test_contiguous_heads_share_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size of the blocks that are merged at a time."""
    heads = np.random.default_rng(0).standard_normal((6, 700, 3)).astype(np.float32)
    monkeypatch.setattr(pooling, "_BLOCK_NUMBERS", 1000)
    found, squared_error, squared_norm = pool_groups(heads, 2, "mean", heads.dtype, "x")
    expected = heads.reshape(2, 3, 700, 3).astype(np.float64).mean(1)
    assert np.array_equal(found, expected.astype(np.float32))
    lost = heads.astype(np.float64) - found.repeat(3, axis=0)
    assert squared_error == pytest.approx((lost**2).sum())
    assert squared_norm == pytest.approx((heads.astype(np.float64) ** 2).sum())


def test_first_takes_head_zero_and_reports_its_error() -> None:
    heads = np.array([[1.0, 2.0], [4.0, 6.0]], np.float32)
    found, squared_error, squared_norm = pool_groups(heads, 1, "first", heads.dtype, "x")
    assert found.tolist() == [[1.0, 2.0]]
    assert squared_error == pytest.approx(9 + 16)
    assert squared_norm == pytest.approx(1 + 4 + 16 + 36)


@pytest.mark.parametrize(
    ("bad", "method", "name"), [(np.nan, "mean", "BF16"), (-np.inf, "first", "F32")]
)
def test_numbers_that_are_none_are_refused(bad: float, method: Pooling, name: str) -> None:
    heads = np.full((3, 5), 1e20, STORED[name])
    assert np.isfinite(merged(heads, method).astype(float)).all(), "large numbers are no infinities"
    heads[2, 4] = bad
    with pytest.raises(NonFiniteError, match="tensor x"):
        merged(heads, method)
