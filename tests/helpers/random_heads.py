"""Heads of random numbers, as a layer has them."""

import numpy as np

from gqa_convert.merging.attention_heads import Heads


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
