"""Decoding against attention written out in float64, and against transformers' own."""

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.cache_utils import StaticCache

from gqa_convert.attention import GroupedQueryAttention, KVCache, grouped_query_attention, register

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def oracle(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bias: Tensor | None) -> Tensor:
    """In float64, with repeated heads; rows that see nothing are zeros."""
    ratio = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(ratio, dim=1) for x in (key, value))
    scores = query.double() @ key.mT * query.shape[3] ** -0.5
    scores = scores if bias is None else scores + bias.double()
    scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ value


def assert_near(result: Tensor, expected: Tensor) -> None:
    limit = TOLERANCE[result.dtype] * max(1.0, expected.abs().max().item())
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=limit)


def masks(kind: str, batch: int, heads: int, queries: int, keys: int) -> dict[str, Tensor]:
    made: dict[str, Tensor] = {}
    if "padding" in kind:
        made["mask"] = torch.rand(batch, 1, 1, keys) < 0.5
        made["mask"][0, :, :, : keys * 3 // 4] = False  # whole blocks
    if "order" in kind:
        made["mask"] = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)[None, None]
    if "bias" in kind:
        made["bias"] = torch.randn(1, heads, queries, keys)
    if "added" in kind:
        made["bias"] = torch.zeros(batch, 1, 1, keys).masked_fill(torch.rand(batch, 1, 1, keys) < 0.5, -torch.inf)
    return made


CASES = [
    # b, N, R, q, k, c, e, masks
    (1, 1, 1, 1, 1, 64, 64, ""),
    (2, 3, 1, 1, 17, 16, 32, "padding"),
    (2, 2, 2, 1, 513, 32, 16, "padding"),
    (1, 2, 3, 1, 300, 80, 80, ""),
    (2, 1, 5, 1, 130, 48, 16, "added"),
    (2, 2, 4, 2, 257, 16, 16, "order"),
    (1, 2, 8, 1, 4097, 128, 128, ""),
    (2, 1, 7, 2, 140, 16, 16, "bias, padding"),
    (1, 1, 16, 1, 128, 192, 16, "padding"),
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_the_function_equals_attention_written_out(number: int) -> None:
    batch, groups, ratio, queries, keys, head_dim, value_head_dim, kind = CASES[number]
    dtype = list(TOLERANCE)[number % 3]
    query = torch.randn(batch, groups * ratio, queries, head_dim).to(dtype)
    # views of a longer buffer, as a static cache makes them, in which the rest is NaN
    key, value = (torch.randn(batch, groups, keys + 5, size).to(dtype) for size in (head_dim, value_head_dim))
    key[:, :, keys:] = value[:, :, keys:] = torch.nan
    key, value = key[:, :, :keys], value[:, :, :keys]
    given = masks(kind, batch, groups * ratio, queries, keys)
    result = grouped_query_attention(query, key, value, **given)
    assert_near(result, oracle(query, key, value, given.get("mask"), given.get("bias")))


@torch.no_grad()
def test_a_layer_with_a_cache_decodes_what_one_pass_gives() -> None:
    attention = GroupedQueryAttention(32, 4, 2, head_dim=16, causal=True)
    inputs, cache = torch.randn(2, 30, 32), KVCache(capacity=64)
    expected = attention(inputs)
    outputs = [attention(inputs[:, :24], cache=cache), attention(inputs[:, 24:27], cache=cache)]
    outputs += [attention(inputs[:, place : place + 1], cache=cache) for place in range(27, 30)]
    torch.testing.assert_close(torch.cat(outputs, 1), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@torch.no_grad()
def test_a_model_generates_the_tokens_that_sdpa_gives(cache: str) -> None:
    register()
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=97,
        initializer_range=0.3,
    )
    tokens = torch.randint(3, 97, (2, 11))
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0
    model = AutoModelForCausalLM.from_config(config).eval()
    found = {}
    for implementation in ("sdpa", "gqa"):
        model.set_attn_implementation(implementation)
        options = {"past_key_values": StaticCache(config=config, max_cache_len=40)} if cache == "static" else {}
        found[implementation] = model.generate(
            tokens, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0, **options
        )
    assert torch.equal(found["gqa"], found["sdpa"])
