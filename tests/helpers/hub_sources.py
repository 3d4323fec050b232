"""Checkpoints as they lie on the Hub, with the configs and tensor names of known repositories and small random weights.

The configs are those of the repositories, with small sizes and without keys that nothing here depends on. The weights
have the names in the repositories' files: without prefixes or with stale buffers, duplicated where the repository
duplicates them, in the repository's type.
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
    config = transformers.AutoConfig.for_model(**source.config)
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

_SIZES = {
    "hidden_size": 96,
    "intermediate_size": 40,
    "num_attention_heads": HEADS,
    "num_hidden_layers": 2,
    "vocab_size": VOCABULARY,
}
_PAIR = {
    "d_model": 96,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
    "num_hidden_layers": 2,
    "is_encoder_decoder": True,
    "vocab_size": VOCABULARY,
}
"""Sizes that many configs share."""

_T5 = {
    "architectures": ["T5ForConditionalGeneration"],
    "d_ff": 40,
    "d_kv": 16,
    "d_model": 32,
    "decoder_start_token_id": 0,
    "eos_token_id": 1,
    "feed_forward_proj": "gated-gelu",
    "is_encoder_decoder": True,
    "model_type": "t5",
    "n_positions": 512,
    "num_decoder_layers": 2,
    "num_heads": HEADS,
    "num_layers": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "vocab_size": VOCABULARY,
}
_T5_EMBEDDINGS = (("encoder.embed_tokens.weight", "shared.weight"), ("decoder.embed_tokens.weight", "shared.weight"))

_BART = _PAIR | {
    "activation_function": "gelu",
    "add_bias_logits": False,
    "add_final_layer_norm": False,
    "architectures": ["BartForConditionalGeneration"],
    "bos_token_id": 0,
    "decoder_start_token_id": 2,
    "eos_token_id": 2,
    "forced_eos_token_id": 2,
    "max_position_embeddings": 64,
    "model_type": "bart",
    "normalize_before": False,
    "pad_token_id": 1,
    "scale_embedding": False,
}
_BART_EMBEDDINGS = (
    ("model.encoder.embed_tokens.weight", "model.shared.weight"),
    ("model.decoder.embed_tokens.weight", "model.shared.weight"),
)

_LLAMA = _SIZES | {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_key_value_heads": HEADS,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}

_OPT = {
    "_remove_final_layer_norm": False,
    "activation_function": "relu",
    "architectures": ["OPTForCausalLM"],
    "bos_token_id": 2,
    "do_layer_norm_before": False,
    "eos_token_id": 2,
    "ffn_dim": 40,
    "hidden_size": 96,
    "max_position_embeddings": 64,
    "model_type": "opt",
    "num_attention_heads": HEADS,
    "num_hidden_layers": 2,
    "output_projection": True,
    "pad_token_id": 1,
    "prefix": "</s>",
    "torch_dtype": "float16",
    "vocab_size": VOCABULARY,
    "word_embed_proj_dim": 48,
}

_GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "bos_token_id": 1,
    "eos_token_id": 1,
    "model_type": "gpt2",
    "n_ctx": 64,
    "n_embd": 96,
    "n_head": HEADS,
    "n_layer": 2,
    "n_positions": 64,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": VOCABULARY,
}


_PYTHIA = _SIZES | {
    "architectures": ["GPTNeoXForCausalLM"],
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "gelu",
    "max_position_embeddings": 64,
    "model_type": "gpt_neox",
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "use_parallel_residual": True,
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
    "tokenizer_name": "EleutherAI/gpt-neox-20b",
    "torch_dtype": "bfloat16",
    "vocab_size": VOCABULARY,
}


_WHISPER = _PAIR | {
    "activation_function": "gelu",
    "architectures": ["WhisperForConditionalGeneration"],
    "begin_suppress_tokens": [20, 57],
    "bos_token_id": 57,
    "decoder_start_token_id": 58,
    "eos_token_id": 57,
    "forced_decoder_ids": [[1, 59], [2, 60], [3, 61]],
    "max_length": 44,
    "max_source_positions": 20,
    "max_target_positions": 44,
    "model_type": "whisper",
    "num_mel_bins": 8,
    "pad_token_id": 57,
    "scale_embedding": False,
    "suppress_tokens": [1, 2, 7],
    "torch_dtype": "float32",
}


_GPTJ = {
    "architectures": ["GPTJForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 1,
    "model_type": "gptj",
    "n_embd": 96,
    "n_head": HEADS,
    "n_inner": None,
    "n_layer": 2,
    "n_positions": 64,
    "rotary": True,
    "rotary_dim": 4,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50, "temperature": 1.0}},
    "tie_word_embeddings": False,
    "tokenizer_class": "GPT2Tokenizer",
    "vocab_size": VOCABULARY,
}


_MARIAN = _PAIR | {
    "activation_function": "swish",
    "add_bias_logits": False,
    "add_final_layer_norm": False,
    "architectures": ["MarianMTModel"],
    "bad_words_ids": [[95]],
    "bos_token_id": 0,
    "decoder_start_token_id": 95,
    "eos_token_id": 0,
    "extra_pos_embeddings": 95,
    "max_length": 64,
    "max_position_embeddings": 64,
    "model_type": "marian",
    "normalize_before": False,
    "normalize_embedding": False,
    "num_beams": 6,
    "pad_token_id": 95,
    "scale_embedding": True,
    "static_position_embeddings": True,
}


def _gptj_buffers() -> Tensors:
    return {"attn.bias": _causal_mask(64, torch.uint8), "attn.masked_bias": torch.tensor(-1e9)}


SEQ2SEQ, SPEECH = "AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq"

HUB_SOURCES: dict[str, HubSource] = {
    "meta-llama/Llama-2-7b-hf": HubSource(
        _LLAMA, buffers=each_layer("model.layers", 2, lambda: dict(_ROTARY)), layout="both", fit=True
    ),
    "EleutherAI/pythia-1b": HubSource(
        _PYTHIA, buffers=each_layer("gpt_neox.layers", 2, _pythia_buffers), layout="both", type_of_copy="phi", fit=True
    ),
    "EleutherAI/gpt-j-6b": HubSource(
        _GPTJ, buffers=each_layer("transformer.h", 2, _gptj_buffers), layout="bin", type_of_copy="phi"
    ),
    "Helsinki-NLP/opus-mt-en-de": HubSource(
        _MARIAN,
        SEQ2SEQ,
        duplicated=_BART_EMBEDDINGS,
        left_out=("lm_head.weight",),
        layout="old bin",
        type_of_copy="gqa_marian",
    ),
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
    "facebook/opt-350m": HubSource(_OPT, layout="bin", type_of_copy="gqa_opt", fit=True),
    "openai-community/gpt2": HubSource(
        _GPT2,
        prefix="transformer.",
        buffers=each_layer("h", 2, lambda: {"attn.bias": _causal_mask(64, torch.float32)}),
        left_out=("lm_head.weight",),
        type_of_copy="gqa_gpt2",
        fit=True,
    ),
    "mosaicml/mpt-7b": HubSource(
        _MPT, left_out=("lm_head.weight",), layout="sharded bin", type_of_copy="gqa_mpt", fit=True
    ),
    "openai/whisper-tiny": HubSource(_WHISPER, SPEECH, left_out=("proj_out.weight",), type_of_copy="gqa_whisper"),
}
"""By the repository that each one imitates."""
