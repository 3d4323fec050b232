"""Checkpoints as they lie on the Hub, with the configs and tensor names of known repositories and small random weights.

The configs are those of the repositories, with small sizes. The weights have the names in the repositories' files:
without prefixes or with stale buffers, duplicated where the repository duplicates them, in the repository's type.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors.torch import save_file

from tests.helpers.tiny import randomise

HEADS = 12
VOCABULARY = 96

Tensors = dict[str, torch.Tensor]
Layout = Literal["safetensors", "sharded", "bin", "old bin", "sharded bin", "both"]


@dataclass(frozen=True)
class HubSource:
    """A repository, in small."""

    config: dict[str, Any]
    auto: str = "AutoModelForCausalLM"
    """The auto class that its weights are made with."""
    made_as: tuple[tuple[str, Any], ...] = ()
    """Config values of the model that the weights are made with, where they differ from the config in the repository."""
    prefix: str = ""
    """What transformers puts in front of its names and the repository does not."""
    buffers: Callable[[Tensors], Tensors] = lambda _: {}
    """The stale buffers in the files, by the other tensors."""
    duplicated: tuple[tuple[str, str], ...] = ()
    """Names in the files whose tensor stands there under another name too: (duplicate, original)."""
    left_out: tuple[str, ...] = ()
    """Names that the files lack, because transformers ties them."""
    layout: Layout = "safetensors"
    groups: int = 3
    type_of_copy: str | None = None
    """The model type of the result, where it is not that of the source."""
    fit: bool = False
    """Whether fit is tried on it."""


def write_hub_source(source: HubSource, folder: Path) -> Path:
    """Write a repository's folder."""
    tensors = hub_tensors(source)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(source.config, indent=2) + "\n")
    names = list(tensors)
    halves = names[::2], names[1::2]
    if source.layout in ("bin", "both"):
        torch.save(tensors, folder / "pytorch_model.bin")
    if source.layout == "old bin":  # the format before torch 1.6
        torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    if source.layout == "sharded bin":
        _write_shards(
            folder,
            tensors,
            halves,
            "pytorch_model-{:05d}-of-00002.bin",
            "pytorch_model.bin.index.json",
            lambda some, path: torch.save(some, path),
        )
    if source.layout == "safetensors":
        save_file(_separate(tensors), folder / "model.safetensors", {"format": "pt"})
    if source.layout in ("sharded", "both"):
        _write_shards(
            folder,
            tensors,
            halves,
            "model-{:05d}-of-00002.safetensors",
            "model.safetensors.index.json",
            lambda some, path: save_file(_separate(some), path, {"format": "pt"}),
        )
    return folder


def _write_shards(
    folder: Path,
    tensors: Tensors,
    halves: tuple[list[str], ...],
    file: str,
    index: str,
    save: Callable[[Tensors, Path], object],
) -> None:
    weight_map = {}
    for number, names in enumerate(halves, 1):
        save({name: tensors[name] for name in names}, folder / file.format(number))
        weight_map |= dict.fromkeys(names, file.format(number))
    total = sum(tensor.nbytes for tensor in tensors.values())
    (folder / index).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))


def _separate(tensors: Tensors) -> Tensors:
    """Copies, because safetensors refuses tensors that share memory."""
    return {name: tensor.clone().contiguous() for name, tensor in tensors.items()}


def hub_tensors(source: HubSource) -> Tensors:
    """The tensors of a repository's files, in its type."""
    config = transformers.AutoConfig.for_model(**source.config | dict(source.made_as))
    torch.manual_seed(0)
    model = getattr(transformers, source.auto).from_config(config, dtype=torch.float32)
    randomise(model)
    dtype = getattr(torch, source.config["torch_dtype"]) if "torch_dtype" in source.config else torch.float32
    made = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    made |= {duplicate: made[original] for duplicate, original in source.duplicated}
    made = {name: tensor for name, tensor in made.items() if name not in source.left_out}
    made = {name.removeprefix(source.prefix): tensor for name, tensor in made.items()}
    return made | source.buffers(made)


def each_layer(place: str, layers: int, buffers: Callable[[], Tensors]) -> Callable[[Tensors], Tensors]:
    """The same buffers in each layer."""
    return lambda _: {
        f"{place}.{number}.{name}": tensor for number in range(layers) for name, tensor in buffers().items()
    }


def _causal_mask(length: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(length, length).tril().view(1, 1, length, length).to(dtype)


_ROTARY = {"self_attn.rotary_emb.inv_freq": 10000.0 ** -(torch.arange(0, 8, 2) / 8)}

_GENERATION = {
    "early_stopping": True,
    "length_penalty": 2.0,
    "max_length": 142,
    "min_length": 56,
    "no_repeat_ngram_size": 3,
    "num_beams": 4,
    "prefix": " ",
}
"""Keys of generation that configs of 2020 hold."""

_T5 = {
    "architectures": ["T5ForConditionalGeneration"],
    "d_ff": 40,
    "d_kv": 16,
    "d_model": 32,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.1,
    "eos_token_id": 1,
    "feed_forward_proj": "gated-gelu",
    "initializer_factor": 1.0,
    "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-06,
    "model_type": "t5",
    "n_positions": 512,
    "num_decoder_layers": 2,
    "num_heads": HEADS,
    "num_layers": 2,
    "output_past": True,
    "pad_token_id": 0,
    "relative_attention_max_distance": 128,
    "relative_attention_num_buckets": 32,
    "tie_word_embeddings": False,
    "transformers_version": "4.23.1",
    "use_cache": True,
    "vocab_size": VOCABULARY,
}
_T5_EMBEDDINGS = (("encoder.embed_tokens.weight", "shared.weight"), ("decoder.embed_tokens.weight", "shared.weight"))

_BART = {
    "_name_or_path": "bart-large",
    "activation_dropout": 0.1,
    "activation_function": "gelu",
    "add_bias_logits": False,
    "add_final_layer_norm": False,
    "architectures": ["BartForConditionalGeneration"],
    "attention_dropout": 0.1,
    "bos_token_id": 0,
    "classif_dropout": 0.1,
    "classifier_dropout": 0.0,
    "d_model": 96,
    "decoder_attention_heads": HEADS,
    "decoder_ffn_dim": 40,
    "decoder_layerdrop": 0.0,
    "decoder_layers": 2,
    "decoder_start_token_id": 2,
    "dropout": 0.1,
    "encoder_attention_heads": HEADS,
    "encoder_ffn_dim": 40,
    "encoder_layerdrop": 0.0,
    "encoder_layers": 2,
    "eos_token_id": 2,
    "forced_eos_token_id": 2,
    "gradient_checkpointing": False,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"},
    "init_std": 0.02,
    "is_encoder_decoder": True,
    "label2id": {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2},
    "max_position_embeddings": 64,
    "model_type": "bart",
    "normalize_before": False,
    "num_hidden_layers": 2,
    "pad_token_id": 1,
    "scale_embedding": False,
    "transformers_version": "4.7.0.dev0",
    "use_cache": True,
    "vocab_size": VOCABULARY,
}
_BART_EMBEDDINGS = (
    ("model.encoder.embed_tokens.weight", "model.shared.weight"),
    ("model.decoder.embed_tokens.weight", "model.shared.weight"),
)

_LLAMA = {
    "_name_or_path": "meta-llama/Llama-2-7b-hf",
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 96,
    "initializer_range": 0.02,
    "intermediate_size": 40,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": HEADS,
    "num_hidden_layers": 2,
    "num_key_value_heads": HEADS,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0",
    "use_cache": True,
    "vocab_size": VOCABULARY,
}

_OPT = {
    "_name_or_path": "opt-350m",
    "_remove_final_layer_norm": False,
    "activation_dropout": 0.0,
    "activation_function": "relu",
    "architectures": ["OPTForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "do_layer_norm_before": False,
    "dropout": 0.1,
    "eos_token_id": 2,
    "ffn_dim": 40,
    "hidden_size": 96,
    "init_std": 0.02,
    "layerdrop": 0.0,
    "max_position_embeddings": 64,
    "model_type": "opt",
    "num_attention_heads": HEADS,
    "num_hidden_layers": 2,
    "output_projection": True,
    "pad_token_id": 1,
    "prefix": "</s>",
    "torch_dtype": "float16",
    "transformers_version": "4.20.0.dev0",
    "use_cache": True,
    "vocab_size": VOCABULARY,
    "word_embed_proj_dim": 48,
}

_GPT2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 1,
    "embd_pdrop": 0.1,
    "eos_token_id": 1,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 64,
    "n_embd": 96,
    "n_head": HEADS,
    "n_layer": 2,
    "n_positions": 64,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": VOCABULARY,
}

_BLOOM = {
    "apply_residual_connection_post_layernorm": False,
    "attention_dropout": 0.0,
    "architectures": ["BloomForCausalLM"],
    "attention_softmax_in_fp32": True,
    "bias_dropout_fusion": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
    "hidden_dropout": 0.0,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "masked_softmax_fusion": True,
    "model_type": "bloom",
    "n_embed": 96,
    "n_inner": None,
    "n_layer": 2,
    "num_attention_heads": HEADS,
    "offset_alibi": 100,
    "pretraining_tp": 1,
    "seq_length": 2048,
    "skip_bias_add": True,
    "skip_bias_add_qkv": False,
    "slow_but_exact": False,
    "transformers_version": "4.20.0",
    "unk_token_id": 0,
    "use_cache": True,
    "vocab_size": VOCABULARY,
}

_PYTHIA = {
    "architectures": ["GPTNeoXForCausalLM"],
    "bos_token_id": 0,
    "classifier_dropout": 0.1,
    "eos_token_id": 0,
    "hidden_act": "gelu",
    "hidden_size": 96,
    "initializer_range": 0.02,
    "intermediate_size": 40,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 64,
    "model_type": "gpt_neox",
    "num_attention_heads": HEADS,
    "num_hidden_layers": 2,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.24.0",
    "use_cache": True,
    "use_parallel_residual": True,
    "vocab_size": VOCABULARY,
}


def _pythia_buffers() -> Tensors:
    return {
        "attention.bias": _causal_mask(64, torch.uint8),
        "attention.masked_bias": torch.tensor(-1e9).to(torch.float16),
        "attention.rotary_emb.inv_freq": 10000.0 ** -(torch.arange(0, 2, 2) / 2).half(),
    }


_MPT = {
    "architectures": ["MPTForCausalLM"],
    "attn_config": {
        "alibi": True,
        "alibi_bias_max": 8,
        "attn_impl": "torch",
        "attn_pdrop": 0,
        "attn_type": "multihead_attention",
        "attn_uses_sequence_id": False,
        "clip_qkv": None,
        "prefix_lm": False,
        "qk_ln": False,
        "softmax_scale": None,
    },
    "auto_map": {
        "AutoConfig": "configuration_mpt.MPTConfig",
        "AutoModelForCausalLM": "modeling_mpt.MPTForCausalLM",
    },
    "d_model": 96,
    "emb_pdrop": 0,
    "embedding_fraction": 1.0,
    "expansion_ratio": 4,
    "init_config": {"emb_init_std": None, "fan_mode": "fan_in", "name": "kaiming_normal_", "verbose": 0},
    "init_device": "cpu",
    "learned_pos_emb": True,
    "logit_scale": None,
    "max_seq_len": 64,
    "model_type": "mpt",
    "n_heads": HEADS,
    "n_layers": 2,
    "no_bias": True,
    "norm_type": "low_precision_layernorm",
    "resid_pdrop": 0,
    "tokenizer_name": "EleutherAI/gpt-neox-20b",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.28.1",
    "use_cache": False,
    "verbose": 0,
    "vocab_size": VOCABULARY,
}

_FALCON = {
    "alibi": True,
    "apply_residual_connection_post_layernorm": False,
    "architectures": ["FalconForCausalLM"],
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_falcon.FalconConfig",
        "AutoModelForCausalLM": "modeling_falcon.FalconForCausalLM",
    },
    "bias": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_dropout": 0.0,
    "hidden_size": 96,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "falcon",
    "multi_query": False,
    "new_decoder_architecture": False,
    "num_attention_heads": HEADS,
    "num_hidden_layers": 2,
    "parallel_attn": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.27.4",
    "use_cache": True,
    "vocab_size": VOCABULARY,
}

_WHISPER = {
    "_name_or_path": "openai/whisper-tiny",
    "activation_dropout": 0.0,
    "activation_function": "gelu",
    "architectures": ["WhisperForConditionalGeneration"],
    "attention_dropout": 0.0,
    "begin_suppress_tokens": [20, 57],
    "bos_token_id": 57,
    "d_model": 96,
    "decoder_attention_heads": HEADS,
    "decoder_ffn_dim": 40,
    "decoder_layerdrop": 0.0,
    "decoder_layers": 2,
    "decoder_start_token_id": 58,
    "dropout": 0.0,
    "encoder_attention_heads": HEADS,
    "encoder_ffn_dim": 40,
    "encoder_layerdrop": 0.0,
    "encoder_layers": 2,
    "eos_token_id": 57,
    "forced_decoder_ids": [[1, 59], [2, 60], [3, 61]],
    "init_std": 0.02,
    "is_encoder_decoder": True,
    "max_length": 44,
    "max_source_positions": 20,
    "max_target_positions": 44,
    "model_type": "whisper",
    "num_hidden_layers": 2,
    "num_mel_bins": 8,
    "pad_token_id": 57,
    "scale_embedding": False,
    "suppress_tokens": [1, 2, 7],
    "torch_dtype": "float32",
    "transformers_version": "4.27.0.dev0",
    "use_cache": True,
    "vocab_size": VOCABULARY,
}

_QWEN15 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "hidden_act": "silu",
    "hidden_size": 96,
    "initializer_range": 0.02,
    "intermediate_size": 40,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": HEADS,
    "num_hidden_layers": 2,
    "num_key_value_heads": HEADS,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.37.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": VOCABULARY,
}

_PHI = {
    "_name_or_path": "microsoft/phi-1_5",
    "architectures": ["PhiForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "embd_pdrop": 0.0,
    "eos_token_id": None,
    "hidden_act": "gelu_new",
    "hidden_size": 96,
    "initializer_range": 0.02,
    "intermediate_size": 40,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "model_type": "phi",
    "num_attention_heads": HEADS,
    "num_hidden_layers": 2,
    "num_key_value_heads": None,
    "partial_rotary_factor": 0.5,
    "qk_layernorm": False,
    "resid_pdrop": 0.0,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.37.0",
    "use_cache": True,
    "vocab_size": VOCABULARY,
}

_STABLELM = {
    "architectures": ["StableLmForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 1,
    "hidden_act": "silu",
    "hidden_size": 96,
    "initializer_range": 0.02,
    "intermediate_size": 40,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 4096,
    "model_type": "stablelm",
    "num_attention_heads": HEADS,
    "num_hidden_layers": 2,
    "num_key_value_heads": HEADS,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.38.0",
    "use_cache": True,
    "use_qkv_bias": True,
    "vocab_size": VOCABULARY,
}

_GEMMA = {
    "architectures": ["GemmaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "head_dim": 16,
    "hidden_act": "gelu",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 96,
    "initializer_range": 0.02,
    "intermediate_size": 40,
    "max_position_embeddings": 8192,
    "model_type": "gemma",
    "num_attention_heads": HEADS,
    "num_hidden_layers": 2,
    "num_key_value_heads": HEADS,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.38.0.dev0",
    "use_cache": True,
    "vocab_size": VOCABULARY,
}

_GPTJ = {
    "activation_function": "gelu_new",
    "architectures": ["GPTJForCausalLM"],
    "attn_pdrop": 0.0,
    "bos_token_id": 1,
    "embd_pdrop": 0.0,
    "eos_token_id": 1,
    "gradient_checkpointing": False,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gptj",
    "n_embd": 96,
    "n_head": HEADS,
    "n_inner": None,
    "n_layer": 2,
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "rotary": True,
    "rotary_dim": 4,
    "scale_attn_weights": True,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50, "temperature": 1.0}},
    "tie_word_embeddings": False,
    "tokenizer_class": "GPT2Tokenizer",
    "transformers_version": "4.18.0.dev0",
    "use_cache": True,
    "vocab_size": VOCABULARY,
}

_GPT_NEO = {
    "activation_function": "gelu_new",
    "architectures": ["GPTNeoForCausalLM"],
    "attention_dropout": 0,
    "attention_layers": ["global", "local"],
    "attention_types": [[["global", "local"], 1]],
    "bos_token_id": 1,
    "embed_dropout": 0,
    "eos_token_id": 1,
    "gradient_checkpointing": False,
    "hidden_size": 96,
    "initializer_range": 0.02,
    "intermediate_size": None,
    "layer_norm_epsilon": 1e-05,
    "max_position_embeddings": 64,
    "model_type": "gpt_neo",
    "num_heads": HEADS,
    "num_layers": 2,
    "resid_dropout": 0,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "transformers_version": "4.9.0.dev0",
    "use_cache": True,
    "vocab_size": VOCABULARY,
    "window_size": 16,
}

_MARIAN = {
    "_num_labels": 3,
    "activation_dropout": 0.0,
    "activation_function": "swish",
    "add_bias_logits": False,
    "add_final_layer_norm": False,
    "architectures": ["MarianMTModel"],
    "attention_dropout": 0.0,
    "bad_words_ids": [[95]],
    "bos_token_id": 0,
    "classif_dropout": 0.0,
    "d_model": 96,
    "decoder_attention_heads": HEADS,
    "decoder_ffn_dim": 40,
    "decoder_layerdrop": 0.0,
    "decoder_layers": 2,
    "decoder_start_token_id": 95,
    "dropout": 0.1,
    "encoder_attention_heads": HEADS,
    "encoder_ffn_dim": 40,
    "encoder_layerdrop": 0.0,
    "encoder_layers": 2,
    "eos_token_id": 0,
    "extra_pos_embeddings": 95,
    "id2label": {"0": "LABEL_0"},
    "init_std": 0.02,
    "is_encoder_decoder": True,
    "label2id": {"LABEL_0": 0},
    "max_length": 64,
    "max_position_embeddings": 64,
    "model_type": "marian",
    "normalize_before": False,
    "normalize_embedding": False,
    "num_beams": 6,
    "num_hidden_layers": 2,
    "pad_token_id": 95,
    "scale_embedding": True,
    "static_position_embeddings": True,
    "vocab_size": VOCABULARY,
}

_NLLB = {
    "_name_or_path": "facebook/nllb-200-distilled-600M",
    "activation_dropout": 0.0,
    "activation_function": "relu",
    "architectures": ["M2M100ForConditionalGeneration"],
    "attention_dropout": 0.1,
    "bos_token_id": 0,
    "d_model": 96,
    "decoder_attention_heads": HEADS,
    "decoder_ffn_dim": 40,
    "decoder_layerdrop": 0,
    "decoder_layers": 2,
    "decoder_start_token_id": 2,
    "dropout": 0.1,
    "encoder_attention_heads": HEADS,
    "encoder_ffn_dim": 40,
    "encoder_layerdrop": 0,
    "encoder_layers": 2,
    "eos_token_id": 2,
    "init_std": 0.02,
    "is_encoder_decoder": True,
    "max_length": 200,
    "max_position_embeddings": 64,
    "model_type": "m2m_100",
    "num_hidden_layers": 2,
    "pad_token_id": 1,
    "scale_embedding": True,
    "tokenizer_class": "NllbTokenizer",
    "torch_dtype": "float32",
    "transformers_version": "4.21.0.dev0",
    "use_cache": True,
    "vocab_size": VOCABULARY,
}

_PHI3 = {
    "_name_or_path": "Phi-3-mini-4k-instruct",
    "architectures": ["Phi3ForCausalLM"],
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    },
    "bos_token_id": 1,
    "embd_pdrop": 0.0,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 96,
    "initializer_range": 0.02,
    "intermediate_size": 40,
    "max_position_embeddings": 4096,
    "model_type": "phi3",
    "num_attention_heads": HEADS,
    "num_hidden_layers": 2,
    "num_key_value_heads": HEADS,
    "original_max_position_embeddings": 4096,
    "pad_token_id": 2,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 2047,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.2",
    "use_cache": True,
    "attention_bias": False,
    "vocab_size": VOCABULARY,
}

_OLMO2 = {
    "architectures": ["Olmo2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 96,
    "initializer_range": 0.02,
    "intermediate_size": 40,
    "max_position_embeddings": 4096,
    "model_type": "olmo2",
    "num_attention_heads": HEADS,
    "num_hidden_layers": 2,
    "num_key_value_heads": HEADS,
    "pad_token_id": 1,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.47.0.dev0",
    "use_cache": True,
    "vocab_size": VOCABULARY,
}


def _gptj_buffers() -> Tensors:
    return {"attn.bias": _causal_mask(64, torch.uint8), "attn.masked_bias": torch.tensor(-1e9)}


SEQ2SEQ, SPEECH = "AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq"

HUB_SOURCES: dict[str, HubSource] = {
    "meta-llama/Llama-2-7b-hf": HubSource(
        _LLAMA, buffers=each_layer("model.layers", 2, lambda: dict(_ROTARY)), layout="both", fit=True
    ),
    "openlm-research/open_llama_7b, without num_key_value_heads": HubSource(
        {key: value for key, value in _LLAMA.items() if key not in ("num_key_value_heads", "rope_scaling")},
        buffers=each_layer("model.layers", 2, lambda: dict(_ROTARY)),
        layout="sharded bin",
    ),
    "a Llama with num_key_value_heads: null": HubSource(_LLAMA | {"num_key_value_heads": None}),
    "EleutherAI/pythia-1b": HubSource(
        _PYTHIA, buffers=each_layer("gpt_neox.layers", 2, _pythia_buffers), layout="both", type_of_copy="phi", fit=True
    ),
    "huggyllama/llama-7b, of the first config": HubSource(
        {
            key: value
            for key, value in _LLAMA.items()
            if key not in ("num_key_value_heads", "rope_scaling", "pretraining_tp")
        }
        | {"architectures": ["LLaMAForCausalLM"], "max_sequence_length": 2048, "pad_token_id": -1, "bos_token_id": 0},
        made_as=(("pad_token_id", None),),
        buffers=each_layer("model.layers", 2, lambda: dict(_ROTARY)),
        layout="sharded bin",
    ),
    "EleutherAI/gpt-j-6b": HubSource(
        _GPTJ, buffers=each_layer("transformer.h", 2, _gptj_buffers), layout="bin", type_of_copy="phi"
    ),
    "EleutherAI/gpt-neo-125m": HubSource(
        _GPT_NEO,
        buffers=each_layer(
            "transformer.h",
            2,
            lambda: {f"attn.attention.{name.removeprefix('attn.')}": each for name, each in _gptj_buffers().items()},
        ),
        left_out=("lm_head.weight",),
        layout="old bin",
        type_of_copy="gqa_gpt_neo",
    ),
    "Salesforce/codegen-350M-mono": HubSource(
        {key: value for key, value in _GPTJ.items() if key != "rotary"}
        | {"architectures": ["CodeGenForCausalLM"], "model_type": "codegen", "n_ctx": 64, "torch_dtype": "float16"},
        buffers=each_layer("transformer.h", 2, lambda: {"attn.causal_mask": _causal_mask(64, torch.uint8)}),
        layout="bin",
        type_of_copy="phi",
    ),
    "Helsinki-NLP/opus-mt-en-de": HubSource(
        _MARIAN,
        SEQ2SEQ,
        duplicated=_BART_EMBEDDINGS,
        left_out=("lm_head.weight",),
        layout="old bin",
        type_of_copy="gqa_marian",
    ),
    "facebook/nllb-200-distilled-600M": HubSource(
        _NLLB, SEQ2SEQ, duplicated=_BART_EMBEDDINGS, layout="bin", type_of_copy="gqa_m2m_100"
    ),
    "microsoft/Phi-3-mini-4k-instruct": HubSource(_PHI3, layout="sharded"),
    "allenai/OLMo-2-1124-7B": HubSource(_OLMO2, layout="sharded"),
    "facebook/galactica-like OPT without biases": HubSource(
        _OPT
        | {
            "do_layer_norm_before": True,
            "word_embed_proj_dim": 96,
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
        },
        type_of_copy="gqa_opt",
    ),
    "stanford-crfm/alias-gpt2-small-x21": HubSource(
        _GPT2 | {"reorder_and_upcast_attn": True, "scale_attn_by_inverse_layer_idx": True},
        buffers=each_layer(
            "transformer.h",
            2,
            lambda: {"attn.bias": _causal_mask(64, torch.uint8), "attn.masked_bias": torch.tensor(-1e4)},
        ),
        type_of_copy="gqa_gpt2",
    ),
    "google/t5-v1_1-small": HubSource(
        _T5, SEQ2SEQ, duplicated=_T5_EMBEDDINGS, layout="bin", type_of_copy="gqa_t5", fit=True
    ),
    "google/flan-t5-small": HubSource(_T5, SEQ2SEQ, duplicated=_T5_EMBEDDINGS, type_of_copy="gqa_t5"),
    "t5-small": HubSource(
        {key: value for key, value in _T5.items() if key not in ("feed_forward_proj", "tie_word_embeddings")}
        | {"architectures": ["T5ForConditionalGeneration"], "task_specific_params": {"summarization": _GENERATION}},
        SEQ2SEQ,
        duplicated=_T5_EMBEDDINGS,
        buffers=lambda made: {
            "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": made[
                "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
            ]
        },
        layout="bin",
        type_of_copy="gqa_t5",
    ),
    "google/mt5-small": HubSource(
        _T5 | {"architectures": ["MT5ForConditionalGeneration"], "model_type": "mt5", "tokenizer_class": "T5Tokenizer"},
        SEQ2SEQ,
        duplicated=_T5_EMBEDDINGS,
        layout="bin",
        type_of_copy="gqa_mt5",
    ),
    "facebook/opt-350m": HubSource(_OPT, layout="bin", type_of_copy="gqa_opt", fit=True),
    "facebook/opt-1.3b, without the prefix model.": HubSource(
        _OPT | {"do_layer_norm_before": True, "word_embed_proj_dim": 96, "_remove_final_layer_norm": False},
        prefix="model.",
        left_out=("lm_head.weight",),
        layout="bin",
        type_of_copy="gqa_opt",
    ),
    "openai-community/gpt2": HubSource(
        _GPT2,
        prefix="transformer.",
        buffers=each_layer("h", 2, lambda: {"attn.bias": _causal_mask(64, torch.float32)}),
        left_out=("lm_head.weight",),
        type_of_copy="gqa_gpt2",
        fit=True,
    ),
    "distilbert/distilgpt2": HubSource(
        _GPT2 | {"_num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}},
        buffers=each_layer(
            "transformer.h",
            2,
            lambda: {"attn.bias": _causal_mask(64, torch.uint8), "attn.masked_bias": torch.tensor(-1e4)},
        ),
        layout="bin",
        type_of_copy="gqa_gpt2",
    ),
    "bigscience/bloom-560m": HubSource(
        _BLOOM, prefix="transformer.", left_out=("lm_head.weight",), type_of_copy="gqa_bloom", fit=True
    ),
    "bigscience/bloom-7b1": HubSource(
        {key: value for key, value in _BLOOM.items() if key not in ("n_embed", "num_attention_heads")}
        | {"hidden_size": 96, "n_head": HEADS, "unk_token_id": 0, "torch_dtype": "float16"},
        prefix="transformer.",
        left_out=("lm_head.weight",),
        layout="sharded bin",
        type_of_copy="gqa_bloom",
    ),
    "tiiuae/falcon-rw-1b": HubSource(_FALCON, layout="bin", type_of_copy="gqa_falcon", fit=True),
    "mosaicml/mpt-7b": HubSource(
        _MPT, left_out=("lm_head.weight",), layout="sharded bin", type_of_copy="gqa_mpt", fit=True
    ),
    "Qwen/Qwen1.5-0.5B": HubSource(_QWEN15, left_out=("lm_head.weight",)),
    "microsoft/phi-2": HubSource(_PHI | {"num_key_value_heads": HEADS, "partial_rotary_factor": 0.5}, layout="sharded"),
    "microsoft/phi-1_5": HubSource(_PHI),
    "stabilityai/stablelm-2-1_6b": HubSource(_STABLELM),
    "google/gemma-7b": HubSource(_GEMMA, left_out=("lm_head.weight",), layout="sharded", fit=True),
    "openai/whisper-tiny": HubSource(_WHISPER, SPEECH, left_out=("proj_out.weight",), type_of_copy="gqa_whisper"),
    "facebook/bart-large-cnn": HubSource(
        _BART | _GENERATION | {"forced_bos_token_id": 0, "task_specific_params": {"summarization": _GENERATION}},
        SEQ2SEQ,
        duplicated=_BART_EMBEDDINGS,
        left_out=("lm_head.weight",),
        type_of_copy="gqa_bart",
        fit=True,
    ),
    "facebook/bart-base, without a head": HubSource(
        _BART | {"architectures": ["BartModel"], "torch_dtype": "float32"},
        "AutoModel",
        duplicated=tuple((a.removeprefix("model."), b.removeprefix("model.")) for a, b in _BART_EMBEDDINGS),
        layout="bin",
        type_of_copy="gqa_bart",
    ),
}
"""By the repository that each one imitates."""
