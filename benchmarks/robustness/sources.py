"""The inputs that are mutated: a Llama of 4 heads, written with numpy and safetensors, a recipe, texts."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

HEADS, HEAD_DIM, HIDDEN, INNER, VOCABULARY = 4, 6, 20, 28, 257
END = "<end>"

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "rope_theta": 5000.0,
    "rms_norm_eps": 1e-05,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "attention_bias": False,
    "eos_token_id": 256,
}

Arrays = dict[str, np.ndarray[Any, Any]]


def arrays(layers: int) -> Arrays:
    """The tensors of the model, in float32."""
    random = np.random.default_rng(0)
    outside = ("model.embed_tokens.weight", "lm_head.weight")
    shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (HIDDEN,)} | dict.fromkeys(outside, (VOCABULARY, HIDDEN))
    for layer in range(layers):
        stem = f"model.layers.{layer}"
        shapes |= {f"{stem}.self_attn.{name}_proj.weight": (HEADS * HEAD_DIM, HIDDEN) for name in "qkv"}
        shapes |= {
            f"{stem}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{stem}.mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{stem}.mlp.up_proj.weight": (INNER, HIDDEN),
            f"{stem}.mlp.down_proj.weight": (HIDDEN, INNER),
            f"{stem}.input_layernorm.weight": (HIDDEN,),
            f"{stem}.post_attention_layernorm.weight": (HIDDEN,),
        }
    return {name: random.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}


def write_checkpoint(folder: Path, *, shards: int = 1, layers: int = 1) -> Path:
    """Write the model with a tokenizer that has one token for each byte."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}, indent=2), encoding="utf-8")
    tensors = arrays(layers)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        weight_map: dict[str, str] = {}
        for number in range(shards):
            file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
            names = list(tensors)[number::shards]
            save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(names, file)
        total = sum(array.nbytes for array in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    _write_tokenizer(folder)
    return folder


def _write_tokenizer(folder: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: place for place, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file in a folder, hidden files included."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
