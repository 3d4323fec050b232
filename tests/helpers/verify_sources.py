"""Sources for the tests of the verifier: native families, and families that are translated."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    LlamaConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    StableLmConfig,
)

from tests.helpers.own_files import make_source
from tests.helpers.verification import save_tokenizer

# 12 query heads to 3 or 4 groups: no two counts coincide
SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 96,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def save_source(
    config: PreTrainedConfig, folder: Path, dtype: torch.dtype = torch.float32, shards: str = "60KB"
) -> Path:
    """A tiny random model, large enough weights for attention to matter, with a tokenizer and a chat template."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.12)
    model.to(dtype).save_pretrained(folder, max_shard_size=shards)
    save_tokenizer(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


NATIVE: dict[str, Callable[[Path], Path]] = {
    "llama": lambda folder: save_source(
        LlamaConfig(**SIZES, num_key_value_heads=12, head_dim=8), folder, torch.bfloat16
    ),
    "llama_one_file": lambda folder: save_source(
        LlamaConfig(**SIZES, num_key_value_heads=12), folder, torch.float16, "1GB"
    ),
    "llama_gqa": lambda folder: save_source(LlamaConfig(**SIZES, num_key_value_heads=4), folder, torch.bfloat16),
    "qwen2": lambda folder: save_source(Qwen2Config(**SIZES, num_key_value_heads=12), folder),
    "phi3": lambda folder: save_source(Phi3Config(**SIZES, num_key_value_heads=12), folder, torch.bfloat16),
    "olmo2": lambda folder: save_source(Olmo2Config(**SIZES, num_key_value_heads=12), folder, torch.float16),
    "cohere": lambda folder: save_source(
        CohereConfig(**SIZES | {"tie_word_embeddings": True}, num_key_value_heads=12, use_qk_norm=True),
        folder,
        torch.bfloat16,
    ),
    "stablelm": lambda folder: save_source(
        StableLmConfig(**SIZES, num_key_value_heads=12, qk_layernorm=True, use_qkv_bias=True), folder, torch.bfloat16
    ),
}


def rotary_positions(part: float, theta: float = 500.0, **scaling: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": part} | scaling}


SERIAL: dict[str, Any] = {"use_parallel_residual": False} | rotary_positions(1.0)

TRANSLATED: dict[str, tuple[str, dict[str, Any], torch.dtype, str]] = {
    "neox": ("gpt_neox", {"layer_norm_eps": 1e-3} | rotary_positions(0.5), torch.float32, "50GB"),
    "neox, half": ("gpt_neox", {}, torch.bfloat16, "40KB"),
    "neox, tied": (
        "gpt_neox",
        {"tie_word_embeddings": True, "attention_bias": False} | rotary_positions(0.5, rope_type="linear", factor=3.0),
        torch.float16,
        "50GB",
    ),
    "serial": ("gpt_neox", SERIAL, torch.float32, "60KB"),
    "serial, half": (
        "gpt_neox",
        SERIAL | {"tie_word_embeddings": True, "attention_bias": False},
        torch.bfloat16,
        "50GB",
    ),
    "gptj": ("gptj", {}, torch.float32, "70KB"),
    "gptj, half": ("gptj", {"rotary_dim": 8, "tie_word_embeddings": True, "n_inner": None}, torch.bfloat16, "50GB"),
    "codegen": ("codegen", {"activation_function": "relu"}, torch.float32, "50GB"),
    "codegen, half": ("codegen", {}, torch.float16, "50GB"),
    "gpt2": ("gpt2", {}, torch.float32, "50GB"),
    "gpt2, half": ("gpt2", {"tie_word_embeddings": False}, torch.bfloat16, "60KB"),
}
"""By name: the model type, its config, the type of the weights and the size of a shard."""


def save_translated(name: str, folder: Path) -> None:
    """Save a source of `TRANSLATED` with a tokenizer."""
    model_type, changes, dtype, shards = TRANSLATED[name]
    make_source(model_type, folder, dtype=dtype, shards=shards, **changes)
    save_tokenizer(folder)
