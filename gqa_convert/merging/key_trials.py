"""Many merges of a layer's keys that begin at different frequencies, at little cost.

A merge sees nothing of the rows but their products. So the rows of a group, and those of a query head, are replaced by
the root of the matrix of their products: trials are merged in a space with as many dimensions as a group has rows. What
they found is a map of rows to rows, which then applies to the layer's own.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from gqa_convert.merging.absorption_limits import AbsorptionLimits
from gqa_convert.merging.attention_heads import Heads
from gqa_convert.merging.factorisation import Array, gram, root
from gqa_convert.merging.merge_layer import Moments, merge_layer


def key_trials(heads: Heads, groups: int, limits: AbsorptionLimits, moments: Moments) -> Callable[[int], Heads]:
    """Returns a function of `first_low`, as `merge_layer` takes it: the heads with keys that are merged in float32, and
    the source's values.

    Args:
        heads: of the source.
        groups: how many K/V heads remain.
        limits: what may be absorbed.
        moments: of the inputs.
    """
    rows = heads.keys.reshape(groups, -1, heads.keys.shape[-1])
    key_root = root(gram(rows, moments.keys))
    query_root = root(gram(heads.queries, moments.queries).sum(1))
    key_inverse, query_inverse = np.linalg.inv(key_root), np.linalg.inv(query_root)
    small = replace(
        heads,
        keys=key_root.astype(np.float32).reshape(*heads.keys.shape[:2], -1),
        queries=query_root.astype(np.float32)[:, None],
    )
    own_rows, own_queries = rows.astype(np.float32), heads.queries.astype(np.float32)
    keys_alone = replace(limits, value_constraint="values are not looked at")

    def trial(first_low: int) -> Heads:
        merged = merge_layer(small, groups, keys_alone, Moments(), first_low)
        key_maps: Array = merged.keys @ key_inverse
        query_maps: Array = merged.queries @ query_inverse[:, None]
        return replace(
            heads,
            keys=key_maps.astype(np.float32) @ own_rows,
            queries=query_maps.astype(np.float32) @ own_queries,
        )

    return trial
