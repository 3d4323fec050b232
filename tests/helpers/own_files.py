"""Tiny random checkpoints of the families that need a modelling file once converted: 12 query heads in the decoder, a
head width that is not hidden size / heads where a config has a key for it, random biases and gains, weights large
enough for attention to matter.
"""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.helpers.tiny import HEADS, VOCAB, randomise

_TOKENS: dict[str, Any] = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_NAMES: dict[str, Any] = _TOKENS | {
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
}
_T5: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 96,
    "d_kv": 16,
    "d_ff": 40,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": HEADS,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "dropout_rate": 0.0,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
_BART: dict[str, Any] = (
    _TOKENS
    | {"d_model": 96, "max_position_embeddings": 64, "decoder_start_token_id": 1, "forced_eos_token_id": None}
    | dict.fromkeys(("encoder_layers", "decoder_layers"), 2)
    | dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 40)
    | dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS)
    | dict.fromkeys(
        ["dropout", "attention_dropout", "activation_dropout", "encoder_layerdrop", "decoder_layerdrop"], 0.0
    )
)
_GPT2: dict[str, Any] = (
    _TOKENS
    | {"n_positions": 64, "n_embd": 96, "n_layer": 3, "n_head": HEADS, "n_inner": 40}
    | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
)

SIZES: dict[str, dict[str, Any]] = {
    "t5": _T5,
    "mt5": _T5,
    "umt5": _T5,
    "longt5": _T5 | {"local_radius": 3, "global_block_size": 4},
    "switch_transformers": _T5
    | {
        "num_experts": 2,
        "expert_capacity": 64,
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
        "router_jitter_noise": 0.0,
    },
    "bart": _BART | {"encoder_attention_heads": 8},
    "mbart": _BART,
    "plbart": _BART,
    "pegasus": _BART,
    "marian": _BART | {"decoder_vocab_size": VOCAB, "encoder_attention_heads": 6},
    "m2m_100": _BART,
    "blenderbot": _BART | {"encoder_no_repeat_ngram_size": 0},
    "blenderbot-small": _BART,
    "whisper": _BART
    | {
        "max_source_positions": 20,
        "max_target_positions": 64,
        "num_mel_bins": 8,
        "begin_suppress_tokens": None,
        "encoder_attention_heads": 6,
        "median_filter_width": 3,
    },
    "opt": _NAMES | {"ffn_dim": 40, "word_embed_proj_dim": 96, "dropout": 0.0},
    "biogpt": _NAMES | {"intermediate_size": 40, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "gpt2": _GPT2,
    "gpt_neo": _TOKENS
    | {
        "hidden_size": 96,
        "num_layers": 4,
        "attention_types": [[["global", "local"], 2]],
        "num_heads": HEADS,
        "intermediate_size": 40,
        "window_size": 4,
        "max_position_embeddings": 64,
    },
    "gptj": _GPT2 | {"rotary_dim": 4},
    "codegen": _GPT2 | {"rotary_dim": 4, "n_ctx": 64},
    "gpt_neox": _NAMES | {"intermediate_size": 40},
    "persimmon": _NAMES | {"intermediate_size": 40},
    "bloom": _TOKENS
    | {
        "hidden_size": 96,
        "n_layer": 3,
        "n_head": HEADS,
    },
    "falcon": _NAMES | {"ffn_hidden_size": 40, "multi_query": False},
    "mpt": _TOKENS
    | {
        "d_model": 96,
        "n_heads": HEADS,
        "n_layers": 2,
        "expansion_ratio": 2,
        "max_seq_len": 64,
        "use_cache": True,
    },
}
"""Config values of each model type."""

_V11: dict[str, Any] = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "scale_decoder_outputs": False}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5, version 1.1": ("t5", _V11),
    "longt5, global": ("longt5", {"encoder_attention_type": "transient-global"}),
    "bart, scaled embeddings": ("bart", {"scale_embedding": True, "encoder_attention_heads": HEADS}),
    "marian, own vocabularies": ("marian", {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False}),
    "opt, norms behind": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 48}),
    "opt, no biases": ("opt", {"enable_bias": False, "layer_norm_elementwise_affine": False}),
    "gpt2, scaled by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2, upcast": ("gpt2", {"reorder_and_upcast_attn": True}),
    "gpt2, cross-attention": ("gpt2", {"add_cross_attention": True}),
    "gpt_neox, serial residual": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    "bloom, residual behind the norm": ("bloom", {"apply_residual_connection_post_layernorm": True}),
    "falcon, 7B": ("falcon", {"multi_query": True}),
    "falcon, 40B": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 6}),
    "falcon, 40B with 4": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 4}),
    "falcon, RW": ("falcon", {"alibi": True, "bias": True, "parallel_attn": False}),
    "mpt, clipped": ("mpt", {"attn_config": {"clip_qkv": 1.0, "softmax_scale": 0.3}}),
}
"""Checkpoints that differ from their family's usual ones in a way that touches attention: model type and config
values.
"""

ALWAYS_REWRITTEN = ("gptj", "codegen")
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    model_type: (model_type, {}) for model_type in SIZES if model_type not in ALWAYS_REWRITTEN
} | VARIANTS


def auto_class(model_type: str) -> str:
    """Name of transformers' auto class for language modelling."""
    if model_type == "whisper":
        return "AutoModelForSpeechSeq2Seq"
    return (
        "AutoModelForSeq2SeqLM"
        if "encoder_layers" in SIZES[model_type] or "d_kv" in SIZES[model_type]
        else "AutoModelForCausalLM"
    )


def make_source_model(model_type: str, *, seed: int = 0, **changes: Any) -> nn.Module:
    """A stock model with random weights, biases and gains, in float32.

    Args:
        model_type: a key of `SIZES`.
        seed: of the weights.
        changes: config values besides or instead of those in `SIZES`.
    """
    config = CONFIG_MAPPING[model_type](**(SIZES[model_type] | changes))
    model = getattr(transformers, auto_class(model_type)).from_config(config, dtype=torch.float32).eval()
    fixed = [(parameter, parameter.detach().clone()) for parameter in model.parameters() if not parameter.requires_grad]
    randomise(model, seed)
    with torch.no_grad():
        for parameter, sinusoids in fixed:
            parameter.copy_(sinusoids)
        for name, buffer in model.named_buffers():
            if name.endswith("final_logits_bias"):
                buffer.normal_(generator=torch.Generator().manual_seed(seed))
    return model


def make_source(
    model_type: str,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    shards: str | int = "50GB",
    **changes: Any,
) -> Path:
    """Save a tiny random stock model, in the names that transformers writes.

    Args:
        model_type: a key of `SIZES`.
        folder: where to.
        dtype: of the weights.
        seed: of the weights.
        shards: size of a shard, at most.
        changes: config values besides or instead of those in `SIZES`.

    Returns:
        The folder.
    """
    make_source_model(model_type, seed=seed, **changes).to(dtype).save_pretrained(folder, max_shard_size=shards)
    return folder


def load_stock(folder: Path, model_type: str, auto: str | None = None, **options: Any) -> nn.Module:
    """Load a source with transformers' own class."""
    return (
        getattr(transformers, auto or auto_class(model_type))
        .from_pretrained(folder, **({"dtype": torch.float32} | options))
        .eval()
    )
