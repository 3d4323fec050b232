"""A ChatGLM2 checkpoint with random weights, and a reference of its architecture in float64."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu

HEADS, GROUPS, WIDTH, HIDDEN, INNER, LAYERS, VOCAB = 12, 6, 16, 40, 24, 3, 50
CONFIG: dict[str, Any] = json.loads(Path(__file__).with_name("chatglm.json").read_text())


def write_source(folder: Path) -> dict[str, Tensor]:
    """A checkpoint with ChatGLM2's names in its usual file, and code that must never run."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int, scale: float = 0.3) -> Tensor:
        return torch.randn(shape, generator=generator) * scale

    rows = (HEADS + 2 * GROUPS) * WIDTH
    tensors = {"transformer.embedding.word_embeddings.weight": numbers(VOCAB, HIDDEN, scale=1)}
    for number in range(LAYERS):
        layer = f"transformer.encoder.layers.{number}"
        tensors |= {
            f"{layer}.input_layernorm.weight": 1 + numbers(HIDDEN),
            f"{layer}.self_attention.query_key_value.weight": numbers(rows, HIDDEN),
            f"{layer}.self_attention.query_key_value.bias": numbers(rows),
            f"{layer}.self_attention.dense.weight": numbers(HIDDEN, HEADS * WIDTH),
            f"{layer}.post_attention_layernorm.weight": 1 + numbers(HIDDEN),
            f"{layer}.mlp.dense_h_to_4h.weight": numbers(2 * INNER, HIDDEN),
            f"{layer}.mlp.dense_4h_to_h.weight": numbers(HIDDEN, INNER),
        }
    tensors["transformer.encoder.final_layernorm.weight"] = 1 + numbers(HIDDEN)
    tensors["transformer.output_layer.weight"] = numbers(VOCAB, HIDDEN)
    folder.mkdir()
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    for name in ("modeling_chatglm.py", "configuration_chatglm.py"):
        (folder / name).write_text(
            "raise AssertionError('this must never run')\n", encoding="utf-8"
        )
    return tensors


def rotate(states: Tensor) -> Tensor:
    """Rotate the first half of each head's dimensions, in interleaved pairs. [heads, length,
    WIDTH].
    """
    rotated = WIDTH // 2
    frequencies = 10000.0 ** -(torch.arange(0, rotated, 2).double() / rotated)
    angles = torch.arange(states.shape[1]).double()[:, None] * frequencies
    first, second = states[..., 0:rotated:2], states[..., 1:rotated:2]
    turned = torch.stack(
        [
            first * angles.cos() - second * angles.sin(),
            second * angles.cos() + first * angles.sin(),
        ],
        -1,
    )
    return torch.cat([turned.flatten(-2), states[..., rotated:]], -1)


def reference(tensors: dict[str, Tensor], config: dict[str, Any], ids: Tensor) -> Tensor:
    """Compute logits [length, VOCAB] in float64. Each of the K/V groups serves HEADS / groups
    consecutive query heads.
    """
    groups = config["multi_query_group_num"]
    weights = {
        name.removeprefix("transformer."): tensor.double() for name, tensor in tensors.items()
    }
    states = embedding(ids, weights["embedding.word_embeddings.weight"])

    def norm(states: Tensor, name: str) -> Tensor:
        return rms_norm(states, (HIDDEN,), weights[name], config["layernorm_epsilon"])

    for number in range(LAYERS):
        layer = f"encoder.layers.{number}"
        fused = linear(
            norm(states, f"{layer}.input_layernorm.weight"),
            weights[f"{layer}.self_attention.query_key_value.weight"],
            weights[f"{layer}.self_attention.query_key_value.bias"],
        )
        heads = fused.unflatten(-1, (-1, WIDTH)).transpose(0, 1)
        query, key, value = heads.split([HEADS, groups, groups])
        key, value = (
            rows.repeat_interleave(HEADS // groups, dim=0) for rows in (rotate(key), value)
        )
        attended = scaled_dot_product_attention(rotate(query), key, value, is_causal=True)
        states = states + linear(
            attended.transpose(0, 1).flatten(1), weights[f"{layer}.self_attention.dense.weight"]
        )
        gate, up = linear(
            norm(states, f"{layer}.post_attention_layernorm.weight"),
            weights[f"{layer}.mlp.dense_h_to_4h.weight"],
        ).chunk(2, -1)
        states = states + linear(silu(gate) * up, weights[f"{layer}.mlp.dense_4h_to_h.weight"])
    return linear(norm(states, "encoder.final_layernorm.weight"), weights["output_layer.weight"])
