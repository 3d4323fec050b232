"""Rotary keys whose slowest frequencies are merged as if they did not turn.

A frequency that the whole context turns by a small angle holds rows that behave like those without positions, and such
rows may be
mixed freely: one real map for all of them loses far less than a complex number for each frequency. Where the slow part
begins decides everything. Too early costs far more than the map can gain, so that the first slow frequency is to be
chosen by the error of the
*rotated* attention on text of full context, layer by layer. Shape legend as in `factorisation`.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from gqa_convert.merging.factorisation import factor_keys, factor_rotary_keys

Array = npt.NDArray[Any]


def factor_partly_rotary_keys(
    keys: tuple[Array, Array],
    queries: tuple[Array, Array],
    start: int,
    covariance: Array | None = None,
    asking: Array | None = None,
) -> tuple[Array, Array, Array, Array]:
    """Merge keys of which some rows turn and others do not: fast frequencies one by one, slow ones and still rows as
    one real block.

    Args:
        keys: rows that turn, [m, f, d], complex, frequencies falling; rows that do not, [m, s, d], real.
        queries: [m, r, f, d] and [m, r, s, d], likewise.
        start: index of the first slow frequency; f for none.
        covariance: of the keys' inputs, not centred.
        asking: of the queries' inputs, where they are others (cross-attention).

    Returns:
        The shared key head, [f, d] complex and [s, d] real; new query rows, [m, r, f, d] complex and [m, r, s, d] real.
    """
    (turning, still), (rotary_queries, still_queries) = keys, queries
    shared, asked = np.empty(turning.shape[1:], complex), np.empty(rotary_queries.shape, complex)
    if start:
        shared[:start], asked[:, :, :start] = factor_rotary_keys(
            turning[:, :start], rotary_queries[:, :, :start], covariance, asking
        )
    slow, low_frequency_queries = turning[:, start:], rotary_queries[:, :, start:]
    rows = np.concatenate([still, slow.real, slow.imag], axis=-2)
    if not rows.shape[1]:
        return shared, still[0], asked, still_queries
    key, readers = factor_keys(
        rows,
        np.concatenate([still_queries, low_frequency_queries.real, low_frequency_queries.imag], axis=-2),
        covariance,
        asking,
    )
    first = still.shape[1]  # what never turns takes the strongest directions of all
    shared[start:] = (key[first::2] + 1j * key[first + 1 :: 2])[::-1]
    asked[:, :, start:] = (readers[:, :, first::2] + 1j * readers[:, :, first + 1 :: 2])[:, :, ::-1]
    return shared, key[:first], asked, readers[:, :, :first]
