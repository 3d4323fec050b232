"""Rotary keys whose lowest frequencies are merged like rows without positions.

A frequency whose angle stays small over the whole context has rows that behave like rows without positions. Such rows
may be mixed freely, and one real map for all of them loses far less than a complex number for each frequency.
Everything depends on where the low frequencies begin: beginning too early costs far more than the map can gain. The
first low frequency is therefore chosen layer by layer, by the error of the attention *with* rotary positions on text of
full context length. The shape legend is that of `factorisation`.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from gqa_convert.merging.factorisation import factor_keys, factor_rotary_keys

Array = npt.NDArray[Any]


def factor_partly_rotary_keys(
    keys: tuple[Array, Array],
    queries: tuple[Array, Array],
    first_low: int,
    covariance: Array | None = None,
    query_covariance: Array | None = None,
) -> tuple[Array, Array, Array, Array]:
    """Merge keys with and without rotary positions: high frequencies one by one, low ones together with the rows
    without positions as one real block.

    Args:
        keys: rotary rows [m, f, d], complex, in order of falling frequency; rows without positions [m, s, d], real.
        queries: [m, r, f, d] and [m, r, s, d] in the same way.
        first_low: index of the first low frequency; f for none.
        covariance: of the keys' inputs, not centred.
        query_covariance: of the queries' inputs, where they differ (cross-attention).

    Returns:
        The shared key head, [f, d] complex and [s, d] real; new query rows, [m, r, f, d] complex and [m, r, s, d] real.
    """
    (rotary, plain), (rotary_queries, plain_queries) = keys, queries
    shared, read = np.empty(rotary.shape[1:], complex), np.empty(rotary_queries.shape, complex)
    if first_low:
        shared[:first_low], read[:, :, :first_low] = factor_rotary_keys(
            rotary[:, :first_low], rotary_queries[:, :, :first_low], covariance, query_covariance
        )
    low, low_queries = rotary[:, first_low:], rotary_queries[:, :, first_low:]
    rows = np.concatenate([plain, low.real, low.imag], axis=-2)
    if not rows.shape[1]:
        return shared, plain[0], read, plain_queries
    key, readers = factor_keys(
        rows,
        np.concatenate([plain_queries, low_queries.real, low_queries.imag], axis=-2),
        covariance,
        query_covariance,
    )
    first = plain.shape[1]  # rows without positions take the strongest directions
    shared[first_low:] = (key[first::2] + 1j * key[first + 1 :: 2])[::-1]
    read[:, :, first_low:] = (readers[:, :, first::2] + 1j * readers[:, :, first + 1 :: 2])[:, :, ::-1]
    return shared, key[:first], read, readers[:, :, :first]
