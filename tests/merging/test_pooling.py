"""Merging is what it says, to the last bit."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from gqa_convert.checkpoint.dtypes import DTYPES
from gqa_convert.errors import NonFiniteError
from gqa_convert.merging.pooling import BlockMerger


def merged(blocks: np.ndarray, method: str = "mean") -> np.ndarray:
    merger = BlockMerger(len(blocks), blocks.dtype, blocks.shape[1])
    merger.source[:] = blocks
    return merger.merge(blocks.shape[1], method, "tensor x").copy()  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize("heads", [2, 3, 4, 12])
def test_the_mean_is_the_exact_mean_to_within_a_rounding(name: str, heads: int) -> None:
    dtype = DTYPES[name]
    blocks = np.random.default_rng(heads).standard_normal((heads, 50)).astype(dtype)
    ours = merged(blocks)
    assert ours.dtype == dtype
    for column in range(50):
        exact = sum((Fraction(float(value)) for value in blocks[:, column]), Fraction(0)) / heads
        largest = max(abs(float(value)) for value in blocks[:, column])
        rounding = abs(exact) * Fraction(float(ml_dtypes.finfo(dtype).eps)) / 2  # of the result, to nearest
        summing = heads * Fraction(largest) * Fraction(2.0**-52 if dtype.itemsize >= 4 else 2.0**-23)
        assert abs(Fraction(float(ours[column])) - exact) <= rounding + summing


@given(arrays.arrays(np.float32, (1, 20), elements=st.floats(-(2.0**99), 2.0**99, width=32)), st.integers(2, 12))
@settings(max_examples=50)
def test_tied_heads_merge_without_loss(head: np.ndarray, copies: int) -> None:
    assert np.array_equal(merged(np.repeat(head, copies, axis=0)), head[0])


def test_float32_sums_are_kept_in_float64() -> None:
    blocks = np.array([[1e8], [1.0], [-1e8], [1.0]], np.float32)
    assert merged(blocks)[0] == np.float32(0.5)


def test_halves_near_their_largest_do_not_overflow() -> None:
    assert merged(np.full((4, 3), 65504, np.float16)).tolist() == [65504.0] * 3
    top = np.full((4, 3), 3.0e38, ml_dtypes.bfloat16)
    assert np.isfinite(top.astype(np.float32)).all()


def test_first_takes_head_zero_and_reports_its_error() -> None:
    blocks = np.array([[1.0, 2.0], [4.0, 6.0]], np.float32)
    merger = BlockMerger(2, blocks.dtype, 2)
    merger.source[:] = blocks
    assert merger.merge(2, "first", "t").tolist() == [1.0, 2.0]
    assert merger.squared_error == pytest.approx(9 + 16)
    assert merger.squared_norm == pytest.approx(1 + 4 + 16 + 36)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("method", ["mean", "first"])
@pytest.mark.parametrize("name", sorted(DTYPES))
def test_numbers_that_are_none_are_refused(bad: float, method: str, name: str) -> None:
    blocks = np.ones((3, 5), DTYPES[name])
    blocks[2, 4] = bad
    with pytest.raises(NonFiniteError, match="tensor"):
        merged(blocks, method)


def test_large_finite_numbers_are_no_infinities() -> None:
    assert merged(np.full((2, 3), 1e20, ml_dtypes.bfloat16)).astype(float)[0] == pytest.approx(1e20, rel=0.01)
