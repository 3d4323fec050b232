"""Cuts of a tensor into heads are exact and reversible."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gqa_convert import layouts

counts = st.integers(1, 7)


@given(heads=counts, width=counts, columns=counts, vector=st.booleans())
def test_separate_round_trip(heads: int, width: int, columns: int, vector: bool) -> None:
    shape = (heads * width,) if vector else (heads * width, columns)
    array = np.arange(np.prod(shape)).reshape(shape)
    views = layouts.split(array, layouts.separate("key", heads, width))
    assert views[0].shape == (heads, width, *shape[1:])
    assert np.array_equal(layouts.join(views), array)


@given(query_rows=counts, heads=counts, key_width=counts, value_width=counts, vector=st.booleans())
def test_fused_round_trip(query_rows: int, heads: int, key_width: int, value_width: int, vector: bool) -> None:
    rows = query_rows + heads * (key_width + value_width)
    array = np.arange(rows * 3).reshape(rows, 3)
    if vector:
        array = array[:, 0]
    query, key, value = layouts.split(array, layouts.fused(query_rows, heads, key_width, value_width))
    assert np.array_equal(query[0], array[:query_rows])
    for head in range(heads):
        first = query_rows + head * key_width
        assert np.array_equal(key[head], array[first : first + key_width])
        first = query_rows + heads * key_width + head * value_width
        assert np.array_equal(value[head], array[first : first + value_width])
    assert np.array_equal(layouts.join([query, key, value]), array)


def test_sections_must_tile_the_axis() -> None:
    with pytest.raises(ValueError, match="do not tile"):
        layouts.split(np.zeros((10, 2)), layouts.separate("key", 3, 4))
