"""Cases of the families whose results load in transformers' own classes, and what such a model computes."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from gqa_convert.families.table import FAMILIES

TOKENS = torch.tensor([[0, 0, 7, 33, 12, 50, 9], [5, 21, 60, 3, 44, 18, 27]])

MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])

OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere, key norm per head": ("cohere", {"use_qk_norm": True}),
    "dots1, head width": ("dots1", {"head_dim": 16}),
    "glm4_moe, key norm": ("glm4_moe", {"use_qk_norm": True, "head_dim": 16}),
    "granitemoehybrid, no rotary": ("granitemoehybrid", {"position_embedding_type": None}),
    "llama, biases": ("llama", {"attention_bias": True}),
    "olmo_hybrid, no rotary": ("olmo_hybrid", {"rope_parameters": None}),
    "phi, key norm": ("phi", {"qk_layernorm": True}),
    "qwen3_moe, head width": ("qwen3_moe", {"head_dim": 16}),
    "qwen3_next, biases": ("qwen3_next", {"attention_bias": True}),
    "stablelm, key norm in a list": ("stablelm", {"qk_layernorm": True, "use_qkv_bias": True}),
    "starcoder2, no biases": ("starcoder2", {"use_bias": False}),
    "zamba2, no rotary": ("zamba2", {"use_mem_rope": False}),
}
"""Variants of a family that concern K/V heads: model type and config values."""

NATIVE = sorted(model_type for model_type, family in FAMILIES.items() if family.native)

CASES = {model_type: (model_type, {}) for model_type in NATIVE} | OPTIONS

REPRESENTATIVE = (
    "llama",
    "phi3",
    "dbrx",
    "cohere, key norm per head",
    "stablelm, key norm in a list",
    "olmo2",
    "qwen3_next",
    "gemma2",
    "mixtral",
)


def load(folder: Path) -> nn.Module:
    """Load a model in float32, and assert that the folder has every parameter."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    return model.eval()


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    """Return the logits of a batch with padding on the left, except at padding."""
    return model(input_ids=TOKENS, attention_mask=MASK, use_cache=False).logits[MASK.bool()]


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, as a share of the expected values' standard deviation."""
    return float((found - expected).abs().max() / expected.std())
