"""Each form of a mask has one meaning, and forms that could have two are refused."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gqa_convert.attention import GroupedQueryAttention
from gqa_convert.errors import OptionError
from tests.helpers.attention import numbers

BATCH = HEADS = 6  # as many sequences as heads: no shape tells them apart
EMBED_DIM, LENGTH = 24, 5


def layer(**options: Any) -> GroupedQueryAttention:
    return GroupedQueryAttention(EMBED_DIM, HEADS, 2, **{"dtype": torch.float64} | options)


def expected(attention: GroupedQueryAttention, inputs: Tensor, added: Tensor) -> Tensor:
    """Torch's own function with repeated heads, and one full float mask [b, H, q, k]."""
    heads = [
        projection(inputs).unflatten(-1, (-1, EMBED_DIM // HEADS)).transpose(1, 2)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    ]
    key, value = (part.repeat_interleave(3, dim=1) for part in heads[1:])
    out = scaled_dot_product_attention(
        heads[0], key, value, attn_mask=added.expand(BATCH, HEADS, LENGTH, LENGTH)
    )
    return attention.out_proj(out.transpose(1, 2).flatten(2))


def as_floats(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)


@pytest.mark.parametrize(
    "sizes", [*itertools.product([1, BATCH], [1, HEADS], [1, LENGTH]), (LENGTH,), (1,)]
)
@pytest.mark.parametrize("kind", ["bool", "float", "bias"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_mask_is_aligned_with_batch_heads_queries_and_keys(
    sizes: tuple[int, ...], kind: str, causal: bool
) -> None:
    mask = torch.rand(*sizes, LENGTH) < 0.6
    mask[..., 0] = True
    added = as_floats(mask) if kind == "bool" else numbers(*sizes, LENGTH)
    attention, inputs = layer(causal=causal), numbers(BATCH, LENGTH, EMBED_DIM)
    result = attention(
        inputs,
        **({"bias": added} if kind == "bias" else {"mask": mask if kind == "bool" else added}),
    )
    full = added[(None,) * (4 - added.dim())]
    if causal:
        full = full + as_floats(torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())
    torch.testing.assert_close(result, expected(attention, inputs, full), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "shape",
    [
        (),
        (LENGTH,),
        (LENGTH, 1),
        (1, LENGTH, LENGTH),
        (BATCH, LENGTH, LENGTH),
        (BATCH, 1, LENGTH, 1),
        (4, LENGTH),
        (1, 2, 1, LENGTH),
        (1, 1, 1, 1, LENGTH),
    ],
)
@pytest.mark.parametrize("argument", ["mask", "bias"])
def test_other_shapes_are_refused(shape: tuple[int, ...], argument: str) -> None:
    given = torch.rand(shape)
    with pytest.raises(
        OptionError,
        match=rf"{argument} is .*give \[queries, keys\] or \[batch, heads, queries, keys\] = "
        r"\[6, 6, 5, 5\]",
    ):
        layer(dtype=torch.float32)(
            torch.zeros(BATCH, LENGTH, EMBED_DIM),
            **{argument: given < 0.5 if argument == "mask" else given},
        )


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_a_float_mask_is_added_beside_a_key_mask(with_bias: bool, causal: bool) -> None:
    attention, inputs = layer(causal=causal), numbers(BATCH, LENGTH, EMBED_DIM)
    mask, bias = numbers(LENGTH, LENGTH), numbers(1, HEADS, LENGTH, LENGTH)
    key_mask = torch.rand(BATCH, LENGTH) < 0.6
    key_mask[:, 0] = True
    added = mask + as_floats(key_mask)[:, None, None] + (bias if with_bias else 0.0)
    if causal:
        added = added + as_floats(torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())
    result = attention(inputs, mask=mask, key_mask=key_mask, bias=bias if with_bias else None)
    torch.testing.assert_close(result, expected(attention, inputs, added), rtol=0, atol=1e-12)
