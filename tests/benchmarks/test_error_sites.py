"""Where the benchmark on a real model says that errors are is where they were put."""

import copy
import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.real.error_sites import bands_of, bands_with_wavelengths, measured, parts_of, query_order, spread

HEADS, KV_HEADS, HEAD_DIM, LAYERS = 6, 3, 24, 3
BLOCKS = torch.arange(90).reshape(2, 45) % 37
ORDERS = [None] * LAYERS


@pytest.fixture
def source() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=36,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def test_the_parts_make_up_the_modules_output(source: Any) -> None:
    attention, states = source.model.layers[1].self_attn, torch.randn(2, 45, 36)
    rotations = source.model.rotary_emb(states, torch.arange(45)[None])
    with torch.no_grad():
        wanted = attention(states, position_embeddings=rotations, attention_mask=None)[0]
        found = parts_of(attention, states, rotations)
    assert torch.allclose(found.contributions.sum(1), wanted, atol=1e-5)


def test_nothing_is_found_where_nothing_differs(source: Any) -> None:
    found = measured(source, copy.deepcopy(source), BLOCKS, ORDERS)
    assert found["kl"] == pytest.approx(0, abs=1e-6)
    for layer in found["layers"]:
        assert layer["output"] == layer["attention_kl"] == sum(layer["heads"]) == sum(layer["errors"]) == 0
        assert layer["kl"] == pytest.approx(0, abs=1e-6)
        assert len(layer["signal"]) == 4
        assert min(layer["signal"]) > 0


def test_an_error_of_one_head_in_one_layer(source: Any) -> None:
    result = copy.deepcopy(source)
    with torch.no_grad():
        result.model.layers[1].self_attn.o_proj.weight[:, 2 * HEAD_DIM : 3 * HEAD_DIM] *= 1.5
    found = measured(source, result, BLOCKS, ORDERS)
    first, second, third = found["layers"]
    assert [head for head, error in enumerate(second["heads"]) if error > 0] == [2]
    assert second["output"] == pytest.approx(second["heads"][2])
    assert second["kl"] == pytest.approx(found["kl"], rel=1e-3)
    assert second["kl"] > 1e-3
    assert first["output"] == third["output"] == second["attention_kl"] == 0
    assert max(first["kl"], third["kl"]) < 1e-6


def test_an_error_of_one_band_of_frequencies(source: Any) -> None:
    result, pair = copy.deepcopy(source), 5
    with torch.no_grad():
        rows = torch.tensor([pair, pair + HEAD_DIM // 2])
        result.model.layers[2].self_attn.k_proj.weight[HEAD_DIM + rows] *= 0.5
    layer = measured(source, result, BLOCKS, ORDERS)["layers"][2]
    assert [band for band, error in enumerate(layer["errors"]) if error > 0] == [1, 3]
    assert layer["errors"][1] == pytest.approx(layer["errors"][3])
    # the second key head has the third and the fourth query head
    assert [head for head, error in enumerate(layer["heads"]) if error > 0] == [2, 3]
    assert layer["attention_kl"] > 0


def test_heads_of_a_result_in_another_order(source: Any) -> None:
    order = [2, 0, 1]
    result = copy.deepcopy(source)
    queries = query_order(source, order)
    assert queries == [4, 5, 0, 1, 2, 3]
    with torch.no_grad():
        for layer in result.model.layers:
            attention = layer.self_attn
            for name, heads in (("q_proj", queries), ("k_proj", order), ("v_proj", order)):
                weight = getattr(attention, name).weight
                weight.copy_(weight.unflatten(0, (-1, HEAD_DIM))[heads].flatten(0, 1))
            columns = attention.o_proj.weight
            columns.copy_(columns.unflatten(1, (-1, HEAD_DIM))[:, queries].flatten(1))
    for layer in measured(source, result, BLOCKS, [order] * LAYERS)["layers"]:
        assert max(layer["output"], *layer["heads"], *layer["errors"]) < 1e-9


def test_half_of_the_spread_is_the_divergence_of_small_errors() -> None:
    scores = torch.randn(1, 2, 5, 7, dtype=torch.float64)
    errors = 1e-3 * torch.randn(1, 2, 5, 7, dtype=torch.float64)
    one, other = scores.softmax(-1), (scores + errors).softmax(-1)
    divergence = float((one * (one / other).log()).sum())
    assert spread(one, errors) / 2 == pytest.approx(divergence, rel=5e-3)
    assert spread(one, torch.ones_like(scores)) == pytest.approx(0, abs=1e-12)


def test_bands_hold_every_pair_once_and_turn_as_slowly_as_their_last(source: Any) -> None:
    assert [[*band] for band in bands_of(12)] == [[0, 1, 2, 3], [4, 5], [6, 7, 8, 9, 10, 11]]
    frequencies = source.model.rotary_emb.inv_freq
    for band, found in zip(bands_of(12), bands_with_wavelengths(source.config), strict=True):
        assert (found["first"], found["last"]) == (band[0], band[-1])
        assert found["wavelength"] == pytest.approx(2 * math.pi / float(frequencies[band[-1]]))
