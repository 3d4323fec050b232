"""Checkpoints of any size with the shapes of a Llama-2 model: real headers and configs, cheap
finite weights.
"""

import json
import os
from pathlib import Path

import numpy as np
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from transformers import LlamaConfig


def make_llama(
    folder: Path,
    *,
    layers: int,
    hidden: int = 4096,
    intermediate: int = 11008,
    heads: int = 32,
    deviation: float = 1.0,
) -> int:
    """Write a bf16 Llama-2-7B-shaped checkpoint with `layers` layers in files of 5 GB; returns its
    bytes of weights.

    The deviation is that of the matrices: with 1.0 attention sees one token each, and numbers grow.
    Norms have weights of 1.
    """
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype=torch.bfloat16,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_hidden_layers=layers,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
    )
    config.save_pretrained(folder)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(layers):
        stem = f"model.layers.{layer}."
        shapes |= {f"{stem}self_attn.{name}_proj.weight": (hidden, hidden) for name in "kqvo"}
        shapes |= {
            f"{stem}mlp.{name}_proj.weight": (intermediate, hidden) for name in ("gate", "up")
        }
        shapes |= {f"{stem}mlp.down_proj.weight": (hidden, intermediate)}
        shapes |= {
            f"{stem}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")
        }
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (config.vocab_size, hidden)}
    # one block, which every matrix repeats from a different place
    normals = np.random.default_rng(0).standard_normal(1 << 24, dtype=np.float32) * np.float32(
        deviation
    )
    block = torch.from_numpy((normals.view(np.uint32) >> 16).astype(np.uint16)).view(torch.bfloat16)
    places = {name: number * 4099 for number, name in enumerate(shapes)}

    def weights(name: str) -> torch.Tensor:
        shape = torch.Size(shapes[name])
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        numbers = block.roll(-places[name]).repeat(-(-shape.numel() // len(block)))
        return numbers[: shape.numel()].view(shape).clone()

    described = {
        name: torch.empty(shape, dtype=torch.bfloat16, device="meta")
        for name, shape in shapes.items()
    }
    split = split_torch_state_dict_into_shards(described, max_shard_size=5_000_000_000)
    for file, names in split.filename_to_tensors.items():
        save_file({name: weights(name) for name in names}, folder / file, {"format": "pt"})
        with (folder / file).open("rb") as saved:
            os.fsync(saved.fileno())
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return sum(tensor.nbytes for tensor in described.values())
