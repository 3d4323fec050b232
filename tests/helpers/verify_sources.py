"""Sources for the tests of the verifier: of stock types, rewritten ones, and those whose results have a modelling file."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.helpers.own_files import make_source
from tests.helpers.verification import edit_json, save_tokenizer

# 12 query heads to 3 or 4 groups: no two counts coincide
SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 96,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Source:
    """A tiny random model."""

    model_type: str
    changes: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    shards: str = "50GB"
    native: bool | None = None
    """Whether conversions are rewritten (True) or have a modelling file (False)."""


def rotary(part: float, **scaling: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": part} | scaling}


HALF = torch.bfloat16
NO_BIAS = {"tie_word_embeddings": True, "attention_bias": False}
SERIAL: dict[str, Any] = {"use_parallel_residual": False} | rotary(1.0)
T5 = {"num_layers": 1, "num_decoder_layers": 2}

SOURCES = {
    "llama": Source("llama", {"head_dim": 8}, HALF, "60KB"),
    "llama, float32": Source("llama", {"head_dim": 12}, shards="60KB"),
    "llama, one file": Source("llama", {}, torch.float16),
    "llama, 4 heads": Source("llama", {"num_key_value_heads": 4}, HALF),
    "qwen2": Source("qwen2", shards="60KB"),
    "phi3": Source("phi3", {}, HALF, "60KB"),
    "olmo2": Source("olmo2", {}, torch.float16),
    "cohere": Source("cohere", {"tie_word_embeddings": True, "use_qk_norm": True}, HALF),
    "stablelm": Source("stablelm", {"qk_layernorm": True, "use_qkv_bias": True}, HALF, "60KB"),
    "neox": Source("gpt_neox", {"layer_norm_eps": 1e-3} | rotary(0.5), native=True),
    "neox, half": Source("gpt_neox", {}, HALF, "40KB", native=True),
    "neox, tied": Source("gpt_neox", NO_BIAS | rotary(0.5, rope_type="linear", factor=3.0), torch.float16, native=True),
    "serial": Source("gpt_neox", SERIAL, shards="60KB", native=True),
    "serial, half": Source("gpt_neox", SERIAL | NO_BIAS, HALF, native=True),
    "gptj": Source("gptj", shards="70KB", native=True),
    "gptj, half": Source("gptj", {"rotary_dim": 8, "tie_word_embeddings": True, "n_inner": None}, HALF, native=True),
    "codegen": Source("codegen", {"activation_function": "relu"}, native=True),
    "codegen, half": Source("codegen", {}, torch.float16, native=True),
    "gpt2 as gpt_bigcode": Source("gpt2", native=True),
    "gpt2 as gpt_bigcode, half": Source("gpt2", {"tie_word_embeddings": False}, HALF, "60KB", native=True),
    "t5": Source("t5", T5, HALF, native=False),
    "switch": Source("switch_transformers", native=False),
    "bart": Source("bart", native=False),
    "bart, decoder alone": Source("bart", native=False),
    "whisper": Source("whisper", native=False),
    "opt": Source("opt", native=False),
    "gpt2": Source("gpt2", {"n_layer": 2}, HALF, native=False),
    "gpt2, cross": Source("gpt2", {"n_layer": 2, "add_cross_attention": True}, native=False),
    "gpt_neo": Source("gpt_neo", native=False),
    "gpt_neox": Source("gpt_neox", rotary(0.5), native=False),
    "bloom": Source("bloom", native=False),
    "mpt": Source("mpt", native=False),
    "falcon": Source("falcon", {"bias": True}, native=False),
    "falcon, 7B": Source("falcon", {"multi_query": True}, native=False),
    "falcon, 40B": Source("falcon", {"new_decoder_architecture": True, "num_kv_heads": 6}, native=False),
}


def save_source(name: str, folder: Path) -> None:
    """Save a source with weights large enough for attention to matter, with a tokenizer and a chat template."""
    source = SOURCES[name]
    if source.native is not None:
        make_source(source.model_type, folder, dtype=source.dtype, shards=source.shards, **source.changes)
    else:
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(source.model_type, **SIZES | source.changes)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.12)
        model.to(source.dtype).save_pretrained(folder, max_shard_size=source.shards)
        (folder / "chat_template.jinja").write_text("{{ messages }}")
    if name == "bart, decoder alone":
        transformers.BartForCausalLM.from_pretrained(folder).save_pretrained(folder)
    save_tokenizer(folder)
    edit_json(folder / "tokenizer_config.json", eos_token="w2")
