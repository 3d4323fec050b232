"""Each form of a mask has one meaning, and forms that could have two are refused."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gqa_convert.attention import GroupedQueryAttention, KVCache, grouped_query_attention
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
    out = scaled_dot_product_attention(heads[0], key, value, attn_mask=added.expand(BATCH, HEADS, LENGTH, LENGTH))
    return attention.out_proj(out.transpose(1, 2).flatten(2))


def as_floats(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)


@pytest.mark.parametrize(
    "sizes", [*itertools.product([1, BATCH], [1, HEADS], [1, LENGTH]), (1, LENGTH), (LENGTH,), (1,)]
)
@pytest.mark.parametrize("kind", ["bool", "float", "bias"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_mask_is_aligned_with_batch_heads_queries_and_keys(sizes: tuple[int, ...], kind: str, causal: bool) -> None:
    mask = torch.rand(*sizes, LENGTH) < 0.6
    mask[..., 0] = True
    added = as_floats(mask) if kind == "bool" else numbers(*sizes, LENGTH)
    attention, inputs = layer(causal=causal), numbers(BATCH, LENGTH, EMBED_DIM)
    result = attention(inputs, **({"bias": added} if kind == "bias" else {"mask": mask if kind == "bool" else added}))
    full = added[(None,) * (4 - added.dim())]
    if causal:
        full = full + as_floats(torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())
    torch.testing.assert_close(result, expected(attention, inputs, full), rtol=0, atol=1e-12)


@pytest.mark.parametrize("argument", ["mask", "bias"])
@pytest.mark.parametrize("first", [BATCH, 2, 3, BATCH * HEADS])
@pytest.mark.parametrize("key_mask", [False, True])
def test_three_axes_are_refused(argument: str, first: int, key_mask: bool) -> None:
    given = torch.rand(first, LENGTH, LENGTH) < 0.5 if argument == "mask" else torch.rand(first, LENGTH, LENGTH)
    options: dict[str, Any] = {argument: given}
    if key_mask:
        options["key_mask"] = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    with pytest.raises(
        OptionError, match=rf"{argument}\[:, None\] for one per sequence, {argument}\[None\] for one per query head"
    ):
        layer(dtype=torch.float32)(torch.zeros(BATCH, LENGTH, EMBED_DIM), **options)
    if not key_mask:
        with pytest.raises(OptionError, match="three axes"):
            grouped_query_attention(*(torch.zeros(BATCH, heads, LENGTH, 4) for heads in (HEADS, 2, 2)), **options)


@torch.no_grad()
def test_what_the_refusal_advises_is_right() -> None:
    attention, inputs = layer(), numbers(BATCH, LENGTH, EMBED_DIM)
    mask = torch.rand(BATCH, LENGTH, LENGTH) < 0.6
    mask[..., 0] = True
    per_sequence = torch.cat([attention(inputs[i : i + 1], mask=mask[i]) for i in range(BATCH)])
    torch.testing.assert_close(attention(inputs, mask=mask[:, None]), per_sequence)
    torch.testing.assert_close(attention(inputs, mask=mask[None]), expected(attention, inputs, as_floats(mask)[None]))
    assert not torch.allclose(attention(inputs, mask=mask[None]), per_sequence)
    flat = torch.rand(BATCH * HEADS, LENGTH, LENGTH) < 0.6
    flat[..., 0] = True
    by_hand = torch.stack([torch.stack([flat[i * HEADS + head] for head in range(HEADS)]) for i in range(BATCH)])
    result = attention(inputs, mask=flat.unflatten(0, (BATCH, HEADS)))
    torch.testing.assert_close(result, expected(attention, inputs, as_floats(by_hand)))
    one = torch.rand(1, LENGTH, LENGTH) < 0.6
    torch.testing.assert_close(attention(inputs, mask=one), attention(inputs, mask=one[0]))


@pytest.mark.parametrize(
    "shape", [(), (LENGTH,), (LENGTH, 1), (BATCH, 1, LENGTH, 1), (4, LENGTH), (1, 2, 1, LENGTH), (1, 1, 1, 1, LENGTH)]
)
@pytest.mark.parametrize("argument", ["mask", "bias"])
def test_other_shapes_are_refused(shape: tuple[int, ...], argument: str) -> None:
    given = torch.rand(shape)
    with pytest.raises(
        OptionError,
        match=rf"{argument} is .*give \[queries, keys\] or \[batch, heads, queries, keys\] = \[6, 6, 5, 5\]",
    ):
        layer(dtype=torch.float32)(
            torch.zeros(BATCH, LENGTH, EMBED_DIM), **{argument: given < 0.5 if argument == "mask" else given}
        )


@torch.no_grad()
def test_a_mask_of_the_new_token_alone_is_refused() -> None:
    attention, cache = layer(causal=True), KVCache()
    attention(numbers(2, LENGTH, EMBED_DIM), cache=cache)
    with pytest.raises(OptionError, match=r"\[2, 6, 1, 6\]"):
        attention(numbers(2, 1, EMBED_DIM), mask=torch.ones(2, 1, 1, 1, dtype=torch.bool), cache=cache)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_a_float_mask_is_added_beside_a_key_mask(with_bias: bool, with_documents: bool, causal: bool) -> None:
    attention, inputs = layer(causal=causal), numbers(BATCH, LENGTH, EMBED_DIM)
    mask, bias = numbers(LENGTH, LENGTH), numbers(1, HEADS, LENGTH, LENGTH)
    key_mask = torch.rand(BATCH, LENGTH) < 0.6
    key_mask[:, 0] = True
    documents = torch.tensor([0, 0, 1, 1, 1]).expand(BATCH, LENGTH) if with_documents else None
    if with_documents:
        key_mask[:, 2] = True
    added = mask + as_floats(key_mask)[:, None, None] + (bias if with_bias else 0.0)
    if causal:
        added = added + as_floats(torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())
    if documents is not None:
        added = added + as_floats(documents[:, :, None] == documents[:, None])[:, None]
    result = attention(inputs, mask=mask, key_mask=key_mask, documents=documents, bias=bias if with_bias else None)
    torch.testing.assert_close(result, expected(attention, inputs, added), rtol=0, atol=1e-12)


def test_types_that_have_no_clear_meaning_are_refused() -> None:
    attention, inputs = layer(), numbers(BATCH, LENGTH, EMBED_DIM)
    with pytest.raises(OptionError, match=r"torch\.int64.*True where a query sees a key"):
        attention(inputs, mask=torch.ones(LENGTH, LENGTH, dtype=torch.int64))
    with pytest.raises(OptionError, match=r"torch\.bool.*boolean mask as mask"):
        attention(inputs, bias=torch.ones(LENGTH, LENGTH, dtype=torch.bool))
    with pytest.raises(OptionError, match=r"torch\.float32.*True where a key is a token"):
        attention(inputs, key_mask=torch.zeros(BATCH, LENGTH))
    for shape in ((LENGTH,), (1, LENGTH), (BATCH, 1), (LENGTH, BATCH)):
        with pytest.raises(OptionError, match=r"\[batch, keys\] = \[6, 5\]"):
            attention(inputs, key_mask=torch.ones(shape, dtype=torch.bool))
