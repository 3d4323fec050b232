"""Heads of random numbers, as a layer has them, and what is lost when they are merged."""

from dataclasses import replace

import numpy as np

from gqa_convert.merging.absorption_limits import AbsorptionLimits
from gqa_convert.merging.attention_heads import Heads, regroup_heads
from gqa_convert.merging.factorisation import Array, Channels, gram
from gqa_convert.merging.head_grouping import reorder_heads
from gqa_convert.merging.merge_layer import Moments, key_channels, value_channels


def random_heads(
    rng: np.random.Generator,
    heads: int,
    ratio: int,
    *,
    head_dim: int,
    value_dim: int,
    inputs: int,
    outputs: int,
    query_inputs: int | None = None,
) -> Heads:
    """K/V heads with `ratio` query heads each; `query_inputs` where queries read other states
    than keys.
    """
    return Heads(
        queries=rng.standard_normal((heads, ratio, head_dim, query_inputs or inputs)),
        keys=rng.standard_normal((heads, head_dim, inputs)),
        values=rng.standard_normal((heads, value_dim, inputs)),
        outputs=rng.standard_normal((heads, ratio, outputs, value_dim)),
        output_bias=None,
    )


def reconstruction_errors(
    source: Heads, merged: Heads, limits: AbsorptionLimits, moments: Moments
) -> tuple[float, float]:
    """The relative errors of the scores and of the output that the values produce.

    Scores are compared over all distances: under rotary positions, frequency by frequency. Inputs
    of queries and of keys count as independent. In rows without rotary positions, what all keys
    have in common is left out, because it has no effect after the softmax.

    Args:
        source: [K] K/V heads.
        merged: the result with fewer K/V heads, or the source itself.
        limits: of the layer, which name the rotary pairs.
        moments: of the inputs.

    Returns:
        |source - merged| / |source| in root mean square: of the scores, and of the values' output.
    """
    if merged is source:
        return 0.0, 0.0
    keys = regroup_heads(merged.keys, source.kv_heads)
    repeated = replace(merged, keys=keys, values=regroup_heads(merged.values, source.kv_heads))
    of_scores, of_values = np.zeros(2), np.zeros(2)
    for head in range(source.kv_heads):  # one by one: complex copies are large
        before, after = (
            reorder_heads(source, np.array([head])),
            reorder_heads(repeated, np.array([head])),
        )
        still, turning = key_channels(before, limits, moments)
        new_still, new_turning = key_channels(after, limits, moments)
        # over all distances, frequencies are orthogonal, and the mean is half the greatest square
        of_scores += _squares(still, new_still) + _squares(turning, new_turning) / 2
        of_values += _squares(value_channels(before, moments), value_channels(after, moments))
    return _relative(of_scores), _relative(of_values)


def _squares(before: Channels, after: Channels) -> Array:
    """[2]: the squares of before - after, and of before, where each is the sum of products of
    readers with their rows.
    """
    readers = np.concatenate([before.readers, -after.readers], axis=-2)
    rows = np.concatenate([before.rows, after.rows], axis=-2)
    of_readers = gram(readers, before.reader_covariance).sum(-3)
    products = (of_readers * gram(rows, before.covariance).conj()).real
    count = before.rows.shape[-2]
    return np.array([products.sum(), products[..., :count, :count].sum()])


def _relative(squares: Array) -> float:
    lost, total = squares
    return float(np.sqrt(max(lost, 0.0) / (total or 1.0)))
