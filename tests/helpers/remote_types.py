"""Model types that load by code of their own: random checkpoints in their own names, made of a stock model that computes
the same by the type's published modelling file.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import FalconConfig, FalconForCausalLM

from tests.helpers.tiny import randomise

HEADS, WIDTH, HIDDEN, INNER, VOCABULARY, LAYERS = 12, 8, 96, 40, 64, 2

Tensors = dict[str, Tensor]


@dataclass
class Reference:
    """A type's config and tensors by name, and the stock model that they were made of."""

    config: dict[str, Any]
    tensors: Tensors
    model: nn.Module

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> Tensor:
        """Logits of token ids, in float64."""
        return self.model.double()(ids[None]).logits[0]

    def save(self, folder: Path, **config: Any) -> Path:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.config | config))
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder


_SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _stock(model_type: str, theta: float = 10000.0, **more: Any) -> tuple[nn.Module, Tensors]:
    """A stock model, whose K/V heads are as many as its query heads unless it is told otherwise, and its tensors."""
    sizes = _SIZES | {"num_key_value_heads": HEADS, "tie_word_embeddings": False, "rope_theta": theta}
    config = transformers.AutoConfig.for_model(model_type, **sizes | more)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomise(model)
    return model, {name: tensor.clone() for name, tensor in model.state_dict().items()}


def _common(model_type: str, architecture: str, **more: Any) -> dict[str, Any]:
    return _SIZES | {
        "model_type": model_type,
        "architectures": [architecture],
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "auto_map": {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": f"modeling_x.{architecture}"},
        **more,
    }


def _renamed(tensors: Tensors, names: dict[str, str]) -> Tensors:
    """The tensors with parts of their names replaced."""
    renamed = {}
    for name, tensor in tensors.items():
        for old, new in names.items():
            name = name.replace(old, new)
        renamed[name] = tensor
    return renamed


def _take_qkv(tensors: Tensors, kind: str = "weight") -> Iterator[tuple[str, list[Tensor]]]:
    """Take each layer's queries, keys and values out of the tensors: the layer's name, and the three."""
    for layer in range(LAYERS):
        base = f"model.layers.{layer}."
        yield base, [tensors.pop(f"{base}self_attn.{part}_proj.{kind}") for part in "qkv"]


def internlm() -> Reference:
    config = _common("internlm", "InternLMForCausalLM", bias=True, rotary={"base": 20000, "type": "dynamic"})
    model, tensors = _stock("llama", 20000.0, attention_bias=True, rms_norm_eps=1e-5)
    return Reference(config, tensors, model)


def internlm2() -> Reference:
    groups = 4
    scaling = {"type": "linear", "factor": 2.0}
    config = _common(
        "internlm2",
        "InternLM2ForCausalLM",
        num_key_value_heads=groups,
        bias=False,
        rope_theta=1000000,
        rope_scaling=scaling,
        attn_implementation="eager",
    )
    model, tensors = _stock("llama", 1e6, num_key_value_heads=groups, rope_scaling=scaling, rms_norm_eps=1e-5)
    for base, (q, k, v) in _take_qkv(tensors):
        q, k, v = (rows.view(groups, -1, WIDTH, HIDDEN) for rows in (q, k, v))
        tensors[f"{base}attention.wqkv.weight"] = torch.cat([q, k, v], 1).reshape(-1, HIDDEN)
    names = {
        "embed_tokens": "tok_embeddings",
        "lm_head": "output",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.down_proj": "feed_forward.w2",
        "mlp.up_proj": "feed_forward.w3",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    return Reference(config, _renamed(tensors, names), model)


def baichuan(architecture: str = "BaiChuanForCausalLM") -> Reference:
    config = _common("baichuan", architecture, rms_norm_eps=1e-6, model_max_length=64)
    model, tensors = _stock("llama", rms_norm_eps=1e-6)
    for base, parts in _take_qkv(tensors):
        tensors[f"{base}self_attn.W_pack.weight"] = torch.cat(parts)
        tensors[f"{base}self_attn.rotary_emb.inv_freq"] = torch.ones(WIDTH // 2)
    return Reference(config, tensors, model)


def baichuan2() -> Reference:
    """The code of the second version divides each row of the output layer by its length."""
    made = baichuan("BaichuanForCausalLM")
    head = made.model.get_output_embeddings().weight
    head.data = nn.functional.normalize(head.data)
    return made


def qwen() -> Reference:
    config = {
        "model_type": "qwen",
        "architectures": ["QWenLMHeadModel"],
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "kv_channels": WIDTH,
        "vocab_size": VOCABULARY,
        "seq_length": 48,
        "max_position_embeddings": 512,
        "layer_norm_epsilon": 1e-6,
        "rotary_emb_base": 10000,
        "rotary_pct": 1.0,
        "no_bias": True,
        "scale_attn_weights": True,
        "use_dynamic_ntk": True,
        "use_logn_attn": True,
        "tie_word_embeddings": False,
        "bf16": False,
        "tokenizer_class": "QWenTokenizer",
        "auto_map": {"AutoConfig": "configuration_qwen.QWenConfig", "AutoTokenizer": ["tokenization_qwen.T", None]},
    }
    model, tensors = _stock("qwen2", rms_norm_eps=1e-6)
    for kind in ("weight", "bias"):
        for base, parts in _take_qkv(tensors, kind):
            tensors[f"{base}attn.c_attn.{kind}"] = torch.cat(parts)
    names = {
        "model.layers": "transformer.h",
        "model.embed_tokens": "transformer.wte",
        "model.norm": "transformer.ln_f",
        "self_attn.o_proj": "attn.c_proj",
        "mlp.up_proj": "mlp.w1",
        "mlp.gate_proj": "mlp.w2",
        "mlp.down_proj": "mlp.c_proj",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
    }
    return Reference(config, _renamed(tensors, names), model)


def minicpm() -> Reference:
    scales = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 32, "tie_word_embeddings": True}
    config = _common("minicpm", "MiniCPMForCausalLM", num_key_value_heads=HEADS, **scales)
    model, tensors = _stock(
        "granite",
        rms_norm_eps=1e-5,
        embedding_multiplier=12,
        residual_multiplier=1.4 / math.sqrt(LAYERS),
        attention_multiplier=1 / math.sqrt(WIDTH),
        logits_scaling=HIDDEN / 32,
        tie_word_embeddings=True,
    )
    del tensors["lm_head.weight"]
    return Reference(config, tensors, model)


REFERENCES: dict[str, Callable[[], Reference]] = {
    "internlm": internlm,
    "internlm2": internlm2,
    "baichuan": baichuan,
    "baichuan, second version": baichuan2,
    "qwen": qwen,
    "minicpm": minicpm,
}


FIRST_FALCONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "RefinedWeb": (
        {"new_decoder_architecture": True, "num_kv_heads": 4},
        {"n_head_kv": 4, "alibi": False, "parallel_attn": True},
    ),
    "RefinedWebModel": ({"multi_query": True}, {"multi_query": True, "parallel_attn": True}),
}
"""By the old name of the type: values of the present config, and of the old one."""


def write_first_falcon(name: str, folder: Path) -> FalconForCausalLM:
    """A Falcon with the config of the releases before transformers knew the type; the model itself."""
    shape, old = FIRST_FALCONS[name]
    sizes = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    torch.manual_seed(0)
    model = FalconForCausalLM(FalconConfig(**sizes, **shape)).eval()
    randomise(model)
    model.save_pretrained(folder)
    stated = {
        "model_type": name,
        "architectures": ["RWForCausalLM"],
        "n_head": HEADS,
        "n_layer": 2,
        "hidden_size": HIDDEN,
        "vocab_size": VOCABULARY,
        "layer_norm_epsilon": 1e-5,
        "apply_residual_connection_post_layernorm": False,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(stated | old))
    return model
