"""Checkpoints of any size with the shapes of a Llama-2 model: real headers and configs, cheap finite weights."""

import json
import math
import os
from pathlib import Path

import numpy as np

from gqa_convert.checkpoint.headers import build_header


def make_llama(
    folder: Path,
    *,
    layers: int,
    hidden: int = 4096,
    intermediate: int = 11008,
    heads: int = 32,
    vocabulary: int = 32000,
    shard_bytes: int = 5_000_000_000,
    deviation: float = 1.0,
) -> int:
    """Write a bf16 Llama-2-7B-shaped checkpoint with `layers` layers; returns its bytes of weights.

    The deviation is that of the matrices: with 1.0 attention sees one token each, and numbers grow. Norms have weights of
    1.
    """
    tensors: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (vocabulary, hidden))]
    for layer in range(layers):
        stem = f"model.layers.{layer}."
        tensors += [(f"{stem}self_attn.{name}_proj.weight", (hidden, hidden)) for name in "kqvo"]
        tensors += [(f"{stem}mlp.{name}_proj.weight", (intermediate, hidden)) for name in ("gate", "up")]
        tensors += [(f"{stem}mlp.down_proj.weight", (hidden, intermediate))]
        tensors += [(f"{stem}{name}_layernorm.weight", (hidden,)) for name in ("input", "post_attention")]
    tensors += [("model.norm.weight", (hidden,)), ("lm_head.weight", (vocabulary, hidden))]
    described = [(name, "BF16", shape, 2 * math.prod(shape)) for name, shape in tensors]
    shards: list[list[tuple[str, str, tuple[int, ...], int]]] = [[]]
    for item in described:
        if shards[-1] and sum(other[3] for other in shards[-1]) + item[3] > shard_bytes:
            shards.append([])
        shards[-1].append(item)
    folder.mkdir(parents=True)
    # float32 normals rounded down to bf16, as one block that every tensor repeats from a different place
    normals = np.random.default_rng(0).standard_normal(1 << 24, dtype=np.float32) * np.float32(deviation)
    block = (normals.view(np.uint32) >> 16).astype(np.uint16)
    ones = np.full(hidden, 0x3F80, np.uint16)
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with (folder / file).open("wb") as out:
            out.write(build_header(shard, {"format": "pt"}))
            for index, (name, _, shape, nbytes) in enumerate(shard):
                weight_map[name] = file
                if len(shape) == 1:
                    out.write(ones.data)
                    continue
                start = index * 4099 % len(block)
                left = nbytes
                while left:
                    piece = block[start:].view(np.uint8).data[:left]
                    out.write(piece)
                    left, start = left - len(piece), 0
            os.fsync(out.fileno())
    total = sum(item[3] for item in described)
    index_json = {
        "metadata": {"total_size": total, "total_parameters": total // 2},
        "weight_map": dict(sorted(weight_map.items())),
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_json, indent=2))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "num_hidden_layers": layers,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return total
