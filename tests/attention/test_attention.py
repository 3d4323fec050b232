"""Grouped-query attention against other people's implementations and against itself in other forms.

Sizes: 12 heads to 3 and 4 K/V heads, and a head width that is not width / heads, so that no two
    counts coincide.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from gqa_convert.attention import (
    GroupedQueryAttention,
    KVCache,
    Rotary,
    core,
    grouped_query_attention,
)
from gqa_convert.errors import GQAConvertError, GroupsError, OptionError
from tests.helpers.attention import distance_bias, numbers, oracle
from tests.helpers.checkpoints import refused

EMBED_DIM, HEADS, HEAD_DIM = 36, 12, 6
EXACT = {"rtol": 0.0, "atol": 1e-12}


def layer(num_kv_heads: int = 3, **options: Any) -> GroupedQueryAttention:
    return GroupedQueryAttention(
        EMBED_DIM,
        HEADS,
        num_kv_heads,
        **{"head_dim": HEAD_DIM, "dtype": torch.float64, "bias": True} | options,
    )


def lower_right(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


# The function


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_the_function_equals_attention_written_out(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    heads, num_kv_heads = data.draw(
        st.sampled_from([(12, 3), (12, 4), (12, 1), (12, 12), (6, 2), (1, 1)])
    )
    batch, keys = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 40))
    causal = data.draw(st.booleans())
    queries = data.draw(st.integers(1, keys if causal else 40))
    width, vdim = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    vdim = data.draw(st.sampled_from([width, vdim]))
    query = numbers(batch, heads, queries, width)
    key, value = numbers(batch, num_kv_heads, keys, width), numbers(batch, num_kv_heads, keys, vdim)
    axis = lambda size: data.draw(st.sampled_from([1, size]))  # noqa: E731
    mask = data.draw(
        st.sampled_from([None, torch.rand(axis(batch), axis(heads), axis(queries), keys) < 0.6])
    )
    bias = data.draw(
        st.sampled_from([None, numbers(axis(batch), axis(heads), axis(queries), keys)])
    )
    scale = data.draw(st.sampled_from([None, 1.0, 0.3]))
    visible = torch.ones(batch, 1, queries, keys, dtype=torch.bool)
    if causal:
        visible = visible & lower_right(queries, keys)
    if mask is not None:
        visible = visible & mask
    result = grouped_query_attention(
        query, key, value, mask=mask, bias=bias, causal=causal, scale=scale
    )
    torch.testing.assert_close(
        result, oracle(query, key, value, visible, 0.0 if bias is None else bias, scale), **EXACT
    )


@pytest.mark.parametrize("num_kv_heads", [1, 3, 4, 12])
@pytest.mark.parametrize("queries", [1, 5, 30])
def test_no_key_or_value_is_repeated(
    num_kv_heads: int, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, seen = core.scaled_dot_product_attention, []

    def spy(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        seen.append((key.shape[1], key.data_ptr(), value.data_ptr()))
        assert options.get("enable_gqa", False) == (query.shape[1] != num_kv_heads)
        return kernel(query, key, value, **options)

    monkeypatch.setattr(core, "scaled_dot_product_attention", spy)
    query, key, value = (
        numbers(2, 12, queries, 8),
        numbers(2, num_kv_heads, 30, 8),
        numbers(2, num_kv_heads, 30, 8),
    )
    grouped_query_attention(query, key, value, causal=True)
    assert seen == [(num_kv_heads, key.data_ptr(), value.data_ptr())]


@pytest.mark.parametrize("trained", ["dropout", "bias"])
def test_in_training_heads_are_packed_on_a_cpu(
    trained: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel for shared heads has no dropout and no gradient of a bias; the other repeats."""
    kernel, seen = core.scaled_dot_product_attention, []

    def spy(query: Tensor, *tensors: Tensor, **options: Any) -> Tensor:
        seen.append((query.shape, options.get("enable_gqa", False)))
        return kernel(query, *tensors, **options)

    monkeypatch.setattr(core, "scaled_dot_product_attention", spy)
    query, key, value = numbers(2, 12, 60, 8), numbers(2, 3, 60, 8), numbers(2, 3, 60, 8)
    if trained == "dropout":
        grouped_query_attention(query, key, value, causal=True, dropout=0.1)
    else:
        bias = numbers(1, 12, 60, 60).requires_grad_()
        grouped_query_attention(query, key, value, bias=bias)
    assert seen == [((2, 3, 240, 8), False)]


@pytest.mark.parametrize("short", [0, 64])
@pytest.mark.parametrize("num_kv_heads", [1, 3, 4, 12])
@pytest.mark.parametrize("queries", [1, 3, 40])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_packed_or_not_the_function_computes_the_same(
    short: int, num_kv_heads: int, queries: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "SHORT", short)
    given = [
        numbers(1, heads, length, 8).to(dtype)
        for heads, length in ((12, queries), (num_kv_heads, 50), (num_kv_heads, 50))
    ]
    query, key, value = (tensor.clone().requires_grad_() for tensor in given)
    exact = [tensor.double().requires_grad_() for tensor in given]
    visible = lower_right(queries, 50)
    per_key, per_head = torch.rand(1, 1, 1, 50) < 0.7, torch.rand(1, 12, queries, 50) < 0.7
    tolerance = 1e-12 if dtype == torch.float64 else 0.02
    for mask in (None, per_key, per_head):
        result = grouped_query_attention(query, key, value, causal=True, mask=mask)
        expected = oracle(*exact, visible if mask is None else visible & mask)
        torch.testing.assert_close(result.double(), expected, rtol=0, atol=tolerance)
        found = torch.autograd.grad(result.sum(), (query, key, value))
        for gradient, wanted in zip(found, torch.autograd.grad(expected.sum(), exact), strict=True):
            torch.testing.assert_close(
                gradient.double(), wanted, rtol=5 * tolerance, atol=5 * tolerance
            )


@pytest.mark.parametrize("queries", [3, 30])
@pytest.mark.parametrize("as_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rows_that_see_nothing_are_zeros_without_nan_in_gradients(
    queries: int, as_bias: bool, dtype: torch.dtype
) -> None:
    query, key, value = (
        numbers(2, heads, queries, 8).to(dtype).requires_grad_() for heads in (12, 3, 3)
    )
    mask = torch.rand(2, 1, queries, queries) < 0.5
    mask[:, :, 1] = False
    bias = torch.zeros(2, 1, queries, queries, dtype=dtype).masked_fill(~mask, -torch.inf)
    result = grouped_query_attention(
        query, key, value, **({"bias": bias} if as_bias else {"mask": mask})
    )
    assert not result[:, :, 1].any()
    assert result.isfinite().all()
    result.float().square().sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (query, key, value))
    assert not query.grad[:, :, 1].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("queries", [1, 64])
@pytest.mark.parametrize("masked", [False, True])
def test_half_precision_is_accumulated_wide(dtype: torch.dtype, queries: int, masked: bool) -> None:
    query, key, value = (
        torch.randn(1, heads, length, 64).to(dtype)
        for heads, length in ((12, queries), (4, 600), (4, 600))
    )
    bias = distance_bias(12, queries, 600) if masked else None
    result = grouped_query_attention(query, key, value, causal=True, bias=bias)
    visible = lower_right(queries, 600)
    wide = oracle(
        query.double(),
        key.double(),
        value.double(),
        visible,
        0.0 if bias is None else bias.double(),
    )
    assert result.dtype == dtype
    # rounding the result, and the weights before they meet the values, is all that may be lost
    assert (result.double() - wide).abs().max() < 2 * torch.finfo(dtype).eps * wide.abs().max()


@pytest.mark.parametrize("queries", [2, 20])
def test_gradients_are_right(queries: int) -> None:
    shapes = ((1, 4, queries, 2), (1, 2, 20, 2), (1, 2, 20, 2), (1, 4, queries, 20))
    given = [numbers(*shape).requires_grad_() for shape in shapes]
    attend = lambda q, k, v, b=None: grouped_query_attention(q, k, v, bias=b, causal=True)  # noqa: E731
    assert torch.autograd.gradcheck(attend, given)
    assert torch.autograd.gradcheck(attend, given[:3])


def test_dropout_drops_weights_and_keeps_the_mean() -> None:
    query, key, value = numbers(1, 12, 20, 6), numbers(1, 3, 20, 6), numbers(1, 3, 20, 6)
    full = grouped_query_attention(query, key, value, causal=True)
    dropped = torch.stack(
        [grouped_query_attention(query, key, value, causal=True, dropout=0.2) for _ in range(400)]
    )
    assert not torch.allclose(dropped[0], full)
    torch.testing.assert_close(dropped.mean(0), full, rtol=0, atol=0.25)


@pytest.mark.parametrize(
    ("shapes", "options", "error"),
    [
        (((1, 12, 2, 6), (1, 5, 2, 6), (1, 5, 2, 6)), {}, GroupsError),
        (((1, 12, 2, 6), (1, 24, 2, 6), (1, 24, 2, 6)), {}, GroupsError),
        (((12, 2, 6), (3, 2, 6), (3, 2, 6)), {}, OptionError),
        (((1, 12, 2, 6), (1, 3, 2, 5), (1, 3, 2, 6)), {}, OptionError),
        (((1, 12, 2, 6), (1, 3, 2, 6), (1, 3, 4, 6)), {}, OptionError),
        (((1, 12, 3, 6), (1, 3, 2, 6), (1, 3, 2, 6)), {"causal": True}, OptionError),
        (((1, 12, 2, 6), (1, 3, 2, 6), (1, 3, 2, 6)), {"cached": 1}, OptionError),
        (
            ((1, 12, 2, 6), (1, 3, 2, 6), (1, 3, 2, 6)),
            {"mask": torch.zeros(2, 2, dtype=torch.int64)},
            OptionError,
        ),
        (
            ((1, 12, 2, 6), (1, 3, 2, 6), (1, 3, 2, 6)),
            {"mask": torch.ones(2, 3, dtype=torch.bool)},
            OptionError,
        ),
        (
            ((1, 12, 2, 6), (1, 3, 2, 6), (1, 3, 2, 6)),
            {"bias": torch.ones(2, 2, dtype=torch.bool)},
            OptionError,
        ),
        (
            ((1, 12, 2, 6), (1, 3, 2, 6), (1, 3, 2, 6)),
            {"bias": torch.ones(1, 3, 2, 2)},
            OptionError,
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    shapes: tuple[tuple[int, ...], ...], options: dict[str, Any], error: type[GQAConvertError]
) -> None:
    with refused(error):
        grouped_query_attention(*(torch.zeros(shape) for shape in shapes), **options)


# The layer


@pytest.mark.parametrize("num_kv_heads", [1, 3, 4, 12])
def test_the_layer_equals_eager_attention_of_transformers(num_kv_heads: int) -> None:
    config = LlamaConfig(
        hidden_size=EMBED_DIM,
        num_attention_heads=HEADS,
        num_key_value_heads=num_kv_heads,
        head_dim=8,
        attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )
    config._attn_implementation = "eager"
    theirs = LlamaAttention(config, 0).double()
    ours = layer(num_kv_heads, head_dim=8, causal=True, rotary=Rotary(500.0))
    ours.load_state_dict(
        {name.replace("o_proj", "out_proj"): tensor for name, tensor in theirs.state_dict().items()}
    )
    inputs, positions = (
        numbers(2, 25, EMBED_DIM),
        torch.stack([torch.arange(25), torch.arange(25) + 7]),
    )
    embedding = LlamaRotaryEmbedding(config)
    embedding.inv_freq = embedding.inv_freq.double()
    mask = torch.zeros(25, 25, dtype=torch.float64).masked_fill(~lower_right(25, 25), -torch.inf)[
        None, None
    ]
    expected = theirs(
        inputs, position_embeddings=embedding(inputs, positions), attention_mask=mask
    )[0]
    torch.testing.assert_close(
        ours(inputs, positions=positions), expected, rtol=0, atol=1e-5
    )  # their angles are float32
    # without rotary
    still = (torch.ones(1, 25, 8, dtype=torch.float64), torch.zeros(1, 25, 8, dtype=torch.float64))
    ours.rotary = None
    for implementation, tolerance in (
        ("eager", 1e-6),
        ("sdpa", 1e-12),
    ):  # the softmax of the former is float32
        config._attn_implementation = implementation
        expected = theirs(inputs, position_embeddings=still, attention_mask=mask)[0]
        torch.testing.assert_close(ours(inputs), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("chunks", [[20], [7, 1, 1, 11], [1] * 20, [18, 2]])
@pytest.mark.parametrize("capacity", [0, 64])
def test_chunked_prefill_and_decoding_equal_one_pass(chunks: list[int], capacity: int) -> None:
    attention = layer(3, causal=True, rotary=Rotary())
    inputs = numbers(2, 20, EMBED_DIM)
    key_mask = torch.ones(2, 20, dtype=torch.int64)
    key_mask[1, :4] = 0
    bias = distance_bias(12, 20, 20, dtype=torch.float64)
    expected = attention(inputs, key_mask=key_mask, bias=bias)
    cache, outputs, done = KVCache(capacity), [], 0
    with torch.no_grad():
        for chunk in chunks:
            end = done + chunk
            outputs.append(
                attention(
                    inputs[:, done:end],
                    key_mask=key_mask[:, :end],
                    bias=bias[:, :, done:end, :end],
                    cache=cache,
                )
            )
            done = end
    torch.testing.assert_close(torch.cat(outputs, 1), expected.detach(), **EXACT)
    assert cache.keys.shape == (2, 3, 20, HEAD_DIM)
    assert cache.values.shape == (2, 3, 20, HEAD_DIM)
    assert cache.nbytes == 2 * 3 * 20 * 2 * HEAD_DIM * 8


@pytest.mark.parametrize("order", ["batch first", "length first"])
def test_padding_on_either_side_changes_nothing(order: str) -> None:
    attention = layer(4, causal=True, rotary=Rotary(), batch_first=order == "batch first")
    turn = (lambda x: x) if attention.batch_first else (lambda x: x.transpose(0, 1))
    inputs = numbers(1, 8, EMBED_DIM)
    expected = turn(attention(turn(inputs)))
    left, right = (
        torch.cat([numbers(1, 3, EMBED_DIM), inputs], 1),
        torch.cat([inputs, numbers(1, 3, EMBED_DIM)], 1),
    )
    for padded, keep in ((left, slice(3, 11)), (right, slice(0, 8))):
        key_mask = torch.zeros(1, 11, dtype=torch.bool)
        key_mask[:, keep] = True
        result = turn(attention(turn(padded), key_mask=key_mask, positions=key_mask.cumsum(1) - 1))
        torch.testing.assert_close(result[:, keep], expected, **EXACT)
        assert result.isfinite().all()


@pytest.mark.parametrize(
    ("options", "inputs"),
    [
        ({}, {"positions": torch.arange(5)}),
        ({"rotary": Rotary()}, {"positions": torch.arange(4)}),
        ({}, {"key_mask": torch.ones(2, 4, dtype=torch.bool)}),
        ({}, {"key_mask": torch.zeros(2, 5)}),
    ],
)
def test_inputs_that_do_not_fit_are_refused(
    options: dict[str, Any], inputs: dict[str, Any]
) -> None:
    with pytest.raises(OptionError):
        layer(dtype=torch.float32, **options)(**{"inputs": torch.zeros(2, 5, EMBED_DIM)} | inputs)


def test_the_examples_of_the_page_run() -> None:
    page = (Path(__file__).parents[2] / "docs" / "converting.md").read_text(encoding="utf-8")
    page = page.split("## Attention layers of your own")[1]
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 3
    exec("\n".join(blocks), {})
