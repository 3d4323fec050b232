"""Tiny random checkpoints of every supported model type: 12 query heads, and a head_dim that is not hidden_size / heads
where a config has a key for it.

The weights are large enough for attention to matter, biases and norm gains are random, and every expert takes part in
every token, so that no rounding error can flip a routing decision.
"""

import copy
import functools
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from gqa_convert.families.table import FAMILIES, Family

HEADS = 12
VOCAB = 64

_TWO = """
    num_experts num_local_experts n_routed_experts moe_num_experts num_experts_per_tok num_experts_per_token moe_k moe_topk
    linear_num_key_heads num_hidden_layers eos_token_id
"""
_ONE = """
    n_group topk_group num_expert_group mamba_n_groups mamba_ngroups n_groups first_k_dense_replace num_dense_layers
    bos_token_id
"""
_WIDTH_OF_EXPERTS = """
    moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size shared_intermediate_size
    moe_shared_expert_intermediate_size dense_intermediate_size
"""
_EIGHT = "mamba_d_state mamba_chunk_size chunk_size linear_key_head_dim linear_value_head_dim"
_FOUR = "sliding_window mamba_n_heads linear_num_value_heads"
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 40,
    "num_attention_heads": HEADS,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "block_auto_adjust_ff_dim": False,
} | {
    key: value
    for keys, value in ((_ONE, 1), (_TWO, 2), (_FOUR, 4), (_EIGHT, 8), (_WIDTH_OF_EXPERTS, 24))
    for key in keys.split()
}

_LINEAR_THEN_FULL = {"layer_types": ["linear_attention", "full_attention"]}

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

_OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": _ROPE | {"mrope_section": [2, 1, 1]}, "full_attention": None},
    },
    "dots1": {"n_shared_experts": 1},
    "falcon_h1": {"mamba_d_ssm": 96},
    "flint": {"layer_types": ["sliding_attention", "full_attention"]},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": {
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
    },
    "granitemoehybrid": _LINEAR_THEN_FULL | {"position_embedding_type": "rope"},
    "helium": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention", "sliding_attention"], "num_hidden_layers": 3},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "moe"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 48,
        "ssm_state_size": 8,
    },
    "olmo_hybrid": _LINEAR_THEN_FULL | {"rope_parameters": _ROPE},
    "phi4_multimodal": {
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "crop_size": 28,
            "image_size": 28,
        },
        "audio_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_blocks": 1,
            "num_attention_heads": 2,
            "ext_pw_out_channel": 16,
            "depthwise_separable_out_channel": 16,
            "nemo_conv_channels": 16,
        },
    },
    "qwen3_5_moe_text": _LINEAR_THEN_FULL,
    "qwen3_5_text": _LINEAR_THEN_FULL,
    "qwen3_next": _LINEAR_THEN_FULL,
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"],
        "hc_count": 2,
        "hc_lowrank": 8,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "stablelm": {"rope_parameters": _ROPE | {"partial_rotary_factor": 0.5}},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "num_hidden_layers": 3,
        "n_mamba_heads": 4,
        "use_mem_rope": True,
    },
}


def make_config(model_type: str, *, kv_heads: int = HEADS, **overrides: Any) -> Any:
    """The config of a tiny model.

    Args:
        model_type: a key of transformers' table.
        kv_heads: K/V heads per layer.
        overrides: further config values.
    """
    cls = CONFIG_MAPPING[model_type]
    known = {name for base in cls.__mro__ for name in getattr(base, "__annotations__", {})}
    values = {key: value for key, value in _SIZES.items() if key in known} | _OVERRIDES.get(model_type, {})
    if model_type == "dbrx":
        values |= {
            "d_model": 96,
            "n_heads": HEADS,
            "n_layers": 2,
            "max_seq_len": 64,
            "ffn_config": {"ffn_hidden_size": 40, "moe_num_experts": 2, "moe_top_k": 2, "hidden_size": 96},
            "attn_config": {"kv_n_heads": kv_heads, "rope_theta": 10000.0, "clip_qkv": 8.0},
        }
    else:
        values["num_key_value_heads"] = kv_heads
    return cls(**(values | overrides))


def make_model(config: Any, *, seed: int = 0) -> nn.Module:
    """A model with random weights, biases and gains."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomise(model, seed)
    return model


@torch.no_grad()
def randomise(model: nn.Module, seed: int = 0) -> None:
    """Draw matrices anew, N(0, 0.12^2); shake the rest, which keeps the decay rates of recurrences sane."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() >= 2 and min(parameter.shape) > 4:
            parameter.copy_(0.12 * noise)
        else:
            parameter.add_(0.2 * noise)


def with_kv_heads(config: Any, family: Family, kv_heads: int) -> Any:
    """Return a copy of a config with another number of K/V heads."""
    config = copy.deepcopy(config)
    for dotted in family.kv_heads_keys:
        *parents, last = dotted.split(".")
        setattr(functools.reduce(getattr, parents, config), last, kv_heads)
    return config


def counted_parameters(config: Any, family: Family) -> set[str]:
    """Names of the parameters that follow the K/V-head count: those that the class shapes otherwise for one K/V head.

    The class itself is asked, so that no table of names can hide the mistake of another; once for each config.
    """
    stated = config.to_dict()
    stated.pop("_name_or_path", None)
    key = f"{type(config).__qualname__} {stated}"
    if key not in _COUNTED:
        _COUNTED[key] = _counted_parameters(config, family)
    return _COUNTED[key]


_COUNTED: dict[str, set[str]] = {}


def _counted_parameters(config: Any, family: Family) -> set[str]:
    shapes = []
    for each in (config, with_kv_heads(config, family, 1)):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(each)
        shapes.append({name: parameter.shape for name, parameter in model.named_parameters()})
    return {name for name, shape in shapes[0].items() if shapes[1].get(name) != shape}


def kv_views(model: nn.Module, family: Family, kv_heads: int) -> list[tuple[str, torch.Tensor]]:
    """Return views [K/V heads, head_dim, ...] of all parameters that count K/V heads."""
    views = []
    for name in sorted(counted_parameters(model.config, family)):
        parameter, (part, last, kind) = model.get_parameter(name), name.rsplit(".", 2)
        if last.isdecimal():  # one tensor per head: they are moved into one, once
            if last == "1":
                siblings = [model.get_parameter(f"{part}.{head}.{kind}") for head in range(kv_heads)]
                stacked = torch.stack([sibling.data for sibling in siblings])
                for sibling, row in zip(siblings, stacked, strict=True):
                    sibling.data = row
                views.append((f"{part}.{kind}", stacked))
        elif last == family.fused:
            width = parameter.shape[0] // (HEADS + 2 * kv_heads)
            rows = zip(("key", "value"), parameter.data[HEADS * width :].chunk(2), strict=True)
            views += [(f"{part}.{role}.{kind}", block.unflatten(0, (kv_heads, -1))) for role, block in rows]
        else:
            views.append((name, parameter.data.unflatten(0, (kv_heads, -1))))
    return views


@torch.no_grad()
def merge_in_place(model: nn.Module, family: Family, kv_heads: int, groups: int, *, strided: bool = False) -> nn.Module:
    """Replace each K/V head by the mean of its group, rounded to the parameters' type.

    Args:
        model: what to change.
        family: its record.
        kv_heads: K/V heads it has.
        groups: groups to merge; neighbouring heads share one.
        strided: heads that are `groups` apart share a group instead, which is wrong.
    """
    for _, heads in kv_views(model, family, kv_heads):
        size = kv_heads // groups
        cut = heads.unflatten(0, (size, groups)).transpose(0, 1) if strided else heads.unflatten(0, (groups, size))
        cut.copy_(cut.double().mean(dim=1, keepdim=True).expand_as(cut))
    return model


def make_checkpoint(
    model_type: str,
    folder: Path,
    *,
    kv_heads: int = HEADS,
    dtype: torch.dtype = torch.float32,
    shards: str | int = "100KB",
    tied: int | None = None,
    seed: int = 0,
    **overrides: Any,
) -> Path:
    """Save a tiny random model in several shards.

    Args:
        model_type: a key of transformers' table.
        folder: where to.
        kv_heads: K/V heads per layer.
        dtype: of the weights.
        shards: size of a shard, at most.
        tied: make the heads of each of so many groups equal.
        seed: of the weights.
        overrides: further config values.

    Returns:
        The folder.
    """
    model = make_model(make_config(model_type, kv_heads=kv_heads, **overrides), seed=seed).to(dtype)
    if tied:
        merge_in_place(model, FAMILIES[model_type], kv_heads, tied)
    model.save_pretrained(folder, max_shard_size=shards)
    return folder
