"""Cuts of a tensor into heads are exact and reversible."""

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from gqa_convert.families import layouts

counts = st.integers(1, 7)


def numbered(rows: int, columns: int, vector: bool) -> npt.NDArray[np.int64]:
    """An array of which every number differs."""
    return np.arange(rows) if vector else np.arange(rows * columns).reshape(rows, columns)


@given(group=counts, kv_heads=counts, width=counts, columns=counts, vector=st.booleans())
def test_fused_round_trips(
    group: int, kv_heads: int, width: int, columns: int, vector: bool
) -> None:
    """Every layout against a reference written with reshapes; what is split in one and joined in
    another is the same heads.
    """
    heads = group * kv_heads
    array = numbered((heads + 2 * kv_heads) * width, columns, vector)
    rest = array.shape[1:]
    reference = {}
    cells = array.reshape(kv_heads, group + 2, width, *rest)
    reference["grouped"] = [
        cells[:, :group].reshape(heads, width, *rest),
        cells[:, group],
        cells[:, group + 1],
    ]
    cells = array.reshape(heads + 2 * kv_heads, width, *rest)
    reference["blocks"] = [
        cells[:heads],
        cells[heads : heads + kv_heads],
        cells[heads + kv_heads :],
    ]
    for layout, expected in reference.items():
        cut = layouts.fused(layout, heads, kv_heads, width)  # type: ignore[arg-type]
        found = layouts.split(array, cut)
        assert [section.role for section in cut] == ["query", "key", "value"]
        assert all(
            np.array_equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True)
        )
        assert np.array_equal(layouts.join(found, cut), array)
