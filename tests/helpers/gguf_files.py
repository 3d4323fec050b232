"""Tiny GGUF files of a Llama, written with the package gguf from an ordinary checkpoint."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def _paired(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rotary pairs as llama.cpp has them: neighbours."""
    return rows.reshape(heads, 2, -1, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf_llama(source: Path, file: Path, quantisation: str, *, tokenizer: bool = True) -> Path:
    """Write a GGUF file of a Llama.

    Args:
        source: its folder, with one safetensors file in float32.
        file: the file to make.
        quantisation: the type of its matrices, such as `Q8_0` or `F16`.
        tokenizer: whether to write one.
    """
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_name("tiny")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_key_length(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    if tokenizer:
        pieces = ["<s>", "</s>", "<unk>", "t", "1", "2", "t1", "t2"]
        tokens = pieces + [f"t{number}" for number in range(len(pieces), config["vocab_size"])]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_types([1] * len(tokens))
        writer.add_token_merges(["t 1", "t 2"])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
    kind = gguf.GGMLQuantizationType[quantisation]
    for name, array in load_file(source / "model.safetensors").items():
        matrix = array.ndim == 2
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config["num_attention_heads" if name.endswith("q_proj.weight") else "num_key_value_heads"]
            array = _paired(array, heads)
        if name in _WHOLE:
            target = _WHOLE[name]
        else:
            _, _, number, *inside, _ = name.split(".")
            target = f"blk.{number}.{_NAMES['.'.join(inside)]}.weight"
        if matrix and quantisation == "F16":
            writer.add_tensor(target, array.astype(np.float16))
        elif matrix:
            writer.add_tensor(target, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(target, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
