"""Generation: the kernel that a decoding step takes on a CPU, the cache, and what is put back after
it.
"""

from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from gqa_convert.families.generating import generating_with
from tests.helpers.tiny import make_config, make_model

WRITTEN = 3


def test_a_step_reads_each_kv_head_once_and_writes_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model: Any = make_model(make_config("llama", kv_heads=3))
    attention = torch.nn.functional.scaled_dot_product_attention
    queries: list[tuple[int, int]] = []

    def seen(query: torch.Tensor, key: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        queries.append((query.shape[1], key.shape[1]))
        return attention(query, key, *others, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", seen)
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": WRITTEN, "pad_token_id": 0}
    prompt = torch.tensor([[5, 3, 8, 2]])
    usual = ALL_ATTENTION_FUNCTIONS["sdpa"]
    with generating_with(model, **settings):
        written = model.generate(prompt)
    layers = model.config.num_hidden_layers
    assert len(queries) == WRITTEN * layers
    assert queries[layers:] == [(3, 3)] * (WRITTEN - 1) * layers, (
        "the query heads of a K/V head are rows of one product"
    )
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is usual
    assert torch.equal(written, model.generate(prompt, **settings))


@pytest.mark.parametrize("heads", [1, 3])
def test_the_cache_grows_in_place(heads: int) -> None:
    """As transformers' own, whatever is done to it in between; the beginning reads a view of other
    strides.
    """
    draw = torch.Generator().manual_seed(0)
    usual, ours = DynamicCache(), DynamicCache()
    kept: list[int] = []

    def add(rows: int, length: int) -> None:
        new = torch.randn(2, rows, length, heads, 4, generator=draw).transpose(2, 3)
        expected = usual.update(*new, 0)
        with generating_with(make_model(make_config("llama"))):
            found = ours.update(*new, 0)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
        assert ours.get_seq_length() == usual.get_seq_length()
        kept.append(found[0].data_ptr())

    def both(change: str, *given: int) -> None:
        for cache in (usual, ours):
            getattr(cache, change)(*given)

    for length in (5, 1, 1, 300, 1):
        add(2, length)
    assert len(set(kept[:3])) == 1
    assert kept[2] != kept[3] == kept[4]
    both("crop", -10)
    add(2, 2)
    both("batch_repeat_interleave", 3)
    add(6, 1)
    both("reset")
    add(1, 3)
