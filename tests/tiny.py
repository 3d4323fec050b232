"""Tiny random checkpoints of every supported model type: 12 query heads, and a head width that is not hidden size / heads where
the config allows that.

The weights are large enough for attention to matter, biases and norm gains are random, and every expert takes part in every token, so
that no rounding error can flip a routing decision.
"""

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

HEADS = 12
VOCAB = 64

_SIZES: dict[str, Any] = dict.fromkeys(
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok", "num_experts_per_token",
     "moe_k", "moe_topk"), 2,
) | dict.fromkeys(
    ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size", "shared_intermediate_size",
     "moe_shared_expert_intermediate_size", "dense_intermediate_size"), 24,
) | dict.fromkeys(
    ("n_group", "topk_group", "num_expert_group", "mamba_n_groups", "mamba_ngroups", "n_groups", "first_k_dense_replace",
     "num_dense_layers"), 1,
) | {
    "vocab_size": VOCAB, "hidden_size": 96, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": 4,
    "mamba_n_heads": 4, "mamba_d_state": 8, "mamba_chunk_size": 8, "chunk_size": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "block_auto_adjust_ff_dim": False,
}  # fmt: skip

_LINEAR_THEN_FULL = {"layer_types": ["linear_attention", "full_attention"]}

_OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "falcon_h1": {"mamba_d_ssm": 96},
    "granitemoehybrid": _LINEAR_THEN_FULL | {"position_embedding_type": "rope"},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention", "sliding_attention"], "num_hidden_layers": 3},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "moe"], "mamba_num_heads": 4, "mamba_head_dim": 48,
        "ssm_state_size": 8,
    },
    "qwen3_5_moe_text": _LINEAR_THEN_FULL,
    "qwen3_5_text": _LINEAR_THEN_FULL,
    "qwen3_next": _LINEAR_THEN_FULL,
    "olmo_hybrid": _LINEAR_THEN_FULL,
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3, "n_mamba_heads": 4},
}  # fmt: skip


def make_config(model_type: str, *, kv_heads: int = HEADS, **overrides: Any) -> Any:
    """The config of a tiny model.

    Args:
        model_type: a key of transformers' table.
        kv_heads: K/V heads per layer.
        overrides: further config values.
    """
    cls = CONFIG_MAPPING[model_type]
    known = set(inspect.signature(cls).parameters) | {name for base in cls.__mro__ for name in getattr(base, "__annotations__", {})}
    values = {key: value for key, value in _SIZES.items() if key in known} | _OVERRIDES.get(model_type, {})
    if model_type == "dbrx":
        values |= {
            "d_model": 96, "n_heads": HEADS, "n_layers": 2, "max_seq_len": 64,
            "ffn_config": {"ffn_hidden_size": 40, "moe_num_experts": 2, "moe_top_k": 2, "hidden_size": 96},
            "attn_config": {"kv_n_heads": kv_heads, "rope_theta": 10000.0, "clip_qkv": None},
        }  # fmt: skip
    else:
        values["num_key_value_heads"] = kv_heads
    return cls(**(values | overrides))


def make_model(config: Any, *, seed: int = 0) -> nn.Module:
    """A model with random weights, biases and gains."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomise(model, seed)
    return model


def randomise(model: nn.Module, seed: int = 0) -> None:
    """Draw every parameter anew: matrices N(0, 0.12), vectors near what they were, so that decay rates of recurrences stay sane."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2 and min(parameter.shape) > 4:
                parameter.copy_(0.12 * noise)
            else:
                parameter.add_(0.2 * noise)


def tie_heads(model: nn.Module, names: tuple[str, ...], heads: int, groups: int) -> None:
    """Make the heads of each group equal to its first, in all parameters whose name ends in one of `names`."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(names):
                cut = parameter.view(groups, heads // groups, -1)
                cut.copy_(cut[:, :1].expand_as(cut))


def make_checkpoint(
    model_type: str, folder: Path, *, kv_heads: int = HEADS, dtype: torch.dtype = torch.float32, shards: str | int = "100KB",
    tied: int | None = None, tied_names: tuple[str, ...] = ("k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias"),
    seed: int = 0, **overrides: Any,
) -> Path:  # fmt: skip
    """Save a tiny random model in several shards.

    Args:
        model_type: a key of transformers' table.
        folder: where to.
        kv_heads: K/V heads per layer.
        dtype: of the weights.
        shards: size of a shard, at most.
        tied: make the heads of each of so many groups equal.
        tied_names: ends of the names of the parameters that `tied` acts on.
        seed: of the weights.
        overrides: further config values.

    Returns:
        The folder.
    """
    model = make_model(make_config(model_type, kv_heads=kv_heads, **overrides), seed=seed)
    if tied:
        tie_heads(model, tied_names, kv_heads, tied)
    model.to(dtype).save_pretrained(folder, max_shard_size=shards)
    return folder
