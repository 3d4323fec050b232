"""Merges the heads of one attention layer by factorisation; the query and output projections absorb
the maps.

The shape legend is that of `attention_heads`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from array_api_compat import array_namespace

from .absorption_limits import AbsorptionLimits
from .attention_heads import Heads, regroup_heads
from .factorisation import Array, Channels, adjoint, factor, gram, on_device, root


@dataclass(frozen=True)
class Moments:
    """E[x x^T] over calibration text, damped, of a layer's inputs together with the constant 1 that
    stands for a bias. None stands for the identity: without text every direction counts alike.

    Attributes:
        queries: [e, e], of the query projection's inputs.
        keys: [e, e], of the inputs of the key and value projections, which differ from the queries'
            in cross-attention.
    """

    queries: Array | None = None
    keys: Array | None = None


def merge_layer(
    heads: Heads,
    kv_heads: int,
    limits: AbsorptionLimits,
    moments: Moments,
    first_low: int | None = None,
) -> Heads:
    """Merge contiguous K/V heads into groups. Where no map can be absorbed, heads are averaged.

    Args:
        heads: of the source.
        kv_heads: how many K/V heads remain.
        limits: what may be absorbed.
        moments: of the inputs.
        first_low: rotary pairs from this index on have low frequencies and are merged like rows
            without positions; None for none. A frequency whose angle stays small over the whole
            context may be, and one real map for all such rows loses far less than a complex number
            for each; but beginning too early costs far more than the map can gain. So whoever
            passes it has compared the error of attention *with* rotary positions, at full context
            length.

    Returns:
        Merged keys and values [groups, ...]; queries and outputs in the source's shapes. With no
        fewer groups than heads, the heads themselves: whether they are repeated does not matter
        here.
    """
    if kv_heads >= heads.kv_heads:
        return heads
    keys, queries = regroup_heads(heads.keys, kv_heads), heads.queries
    if not limits.key_constraint:
        xp = array_namespace(keys)
        still, pairs = limits.divide_rows(keys.shape[1], first_low)
        still_channels, turning_channels = key_channels(heads, limits, moments, first_low)
        still_keys, still_queries = factor(still_channels, kv_heads)
        turning_keys, turning_queries = factor(turning_channels, kv_heads)
        # both kinds of rows go back to where they were in a head
        order = on_device(np.argsort(np.concatenate([still, pairs.reshape(-1)])), keys)
        keys = xp.concat([still_keys, _by_row(turning_keys)], axis=-2)[:, order]
        queries = xp.concat([still_queries, _by_row(turning_queries)], axis=-2)[:, :, order]
    values, outputs = regroup_heads(heads.values, kv_heads), heads.outputs
    if not limits.value_constraint:
        values, columns = factor(value_channels(heads, moments), kv_heads)
        outputs = adjoint(columns)
    return replace(heads, queries=queries, keys=keys, values=values, outputs=outputs)


def value_channels(heads: Heads, moments: Moments) -> Channels:
    """The values, which the output projection's columns read.

    Without text, directions that are read strongly do not count more: on the models that were tried
    this lost less.
    """
    return Channels(
        heads.values, adjoint(heads.outputs), moments.keys, None, weighted=moments.keys is not None
    )


def key_channels(
    heads: Heads, limits: AbsorptionLimits, moments: Moments, first_low: int | None = None
) -> tuple[Channels, Channels]:
    """The keys' rows that count as having no positions, which a real map may mix, and the rotary
    pairs, each by itself, as one complex row. Queries read them.

    Args:
        heads: of a layer.
        limits: of the layer.
        moments: of its inputs. They are centred where no row has positions, since what all keys
            have in common has no effect after the softmax, and not for the rest, because the mean
            key holds the attention sink.
        first_low: as `merge_layer` takes it.
    """
    still, pairs = limits.divide_rows(heads.keys.shape[1], first_low)
    still = on_device(np.sort(still), heads.keys)  # only what is merged has an order of strength
    covariance = moments.keys
    if covariance is not None and pairs.size == limits.pairs.size:  # no row has positions
        total = covariance[:, -1:]
        covariance = covariance - total * total[:, 0] / total[-1]
    return (
        Channels(heads.keys[:, still], heads.queries[:, :, still], covariance, moments.queries),
        Channels(
            _by_pair(heads.keys, pairs),
            _by_pair(heads.queries, pairs),
            moments.keys,
            moments.queries,
        ),
    )


def _by_pair(rows: Array, pairs: Array) -> Array:
    """[f, ..., 1, e], complex, of [..., c, e]."""
    xp = array_namespace(rows)
    real, imaginary = (xp.take(rows, on_device(part, rows), axis=-2) for part in pairs)
    return xp.moveaxis(real + 1j * imaginary, -2, 0)[..., None, :]


def _by_row(turning: Array) -> Array:
    """The reverse, [..., 2 f, e]: first the real parts, then the imaginary ones."""
    xp = array_namespace(turning)
    turning = xp.moveaxis(turning[..., 0, :], 0, -2)
    return xp.concat([xp.real(turning), xp.imag(turning)], axis=-2)


def key_trials(
    heads: Heads, kv_heads: int, limits: AbsorptionLimits, moments: Moments
) -> Callable[[int], Heads]:
    """Many merges of a layer's keys that begin at different frequencies, at little cost.

    A merge sees nothing of the rows but their products. So the rows of a group, and those of a
    query head, are replaced by the root of the matrix of their products: trials are merged in a
    space with as many dimensions as a group has rows. What they found is a map of rows to rows,
    which then applies to the layer's own.

    Args:
        heads: of the source.
        kv_heads: how many K/V heads remain.
        limits: what may be absorbed.
        moments: of the inputs.

    Returns:
        A function of `first_low`, as `merge_layer` takes it: the heads with keys that are merged in
        float32, and the source's values.
    """
    xp = array_namespace(heads.keys)

    def single(array: Array) -> Array:
        return xp.astype(array, xp.float32)

    rows = xp.reshape(heads.keys, (kv_heads, -1, heads.keys.shape[-1]))
    key_root, key_inverse = root(gram(rows, moments.keys))
    of_queries = xp.sum(gram(heads.queries, moments.queries), axis=1)
    query_root, query_inverse = root(of_queries)
    small = replace(
        heads,
        keys=xp.reshape(single(key_root), (*heads.keys.shape[:2], -1)),
        queries=single(query_root)[:, None],
    )
    own_rows, own_queries = single(rows), single(heads.queries)
    keys_alone = replace(limits, value_constraint="values are not looked at")

    def trial(first_low: int) -> Heads:
        merged = merge_layer(small, kv_heads, keys_alone, Moments(), first_low)
        key_maps = xp.astype(merged.keys, key_inverse.dtype) @ key_inverse
        query_maps = xp.astype(merged.queries, query_inverse.dtype) @ query_inverse[:, None]
        return replace(
            heads, keys=single(key_maps) @ own_rows, queries=single(query_maps) @ own_queries
        )

    return trial
