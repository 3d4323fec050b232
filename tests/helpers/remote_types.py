"""Model types that load by code of their own, written down anew: random checkpoints in their own names, and what their
code computes.

Each forward pass follows the type's published modelling file, not the converter's tables. Shape legend: L tokens, H
query heads, N K/V heads, c head width, d model width.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear, normalize, silu
from transformers import FalconConfig, FalconForCausalLM

from tests.helpers.tiny import randomise

HEADS, WIDTH, HIDDEN, INNER, VOCABULARY, LAYERS = 12, 8, 96, 40, 64, 2

Tensors = dict[str, Tensor]


def turned(x: Tensor, theta: float, rotated: int, scale: float = 1.0) -> Tensor:
    """Rotary positions on the first `rotated` numbers of heads [heads, L, c], pairs (j, j + rotated / 2); positions are
    divided by `scale`.
    """
    half = rotated // 2
    speeds = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.outer(torch.arange(x.shape[1], dtype=torch.float64) / scale, speeds)
    cos, sin = angles.cos(), angles.sin()
    first, second, rest = x[..., :half], x[..., half:rotated], x[..., rotated:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of heads [H, L, c] with K/V heads [N, L, c]; the result is [L, H * c]."""
    size = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(size, 0), value.repeat_interleave(size, 0)
    scores = query @ key.transpose(1, 2) / math.sqrt(query.shape[-1])
    length = query.shape[1]
    scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -math.inf)
    return (scores.softmax(-1) @ value).transpose(0, 1).reshape(length, -1)


def cut(x: Tensor, heads: int) -> Tensor:
    """[L, heads * c] -> [heads, L, c]."""
    return x.view(x.shape[0], heads, -1).transpose(0, 1)


def rms(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * gain


def llama_block(
    w: Callable[..., Any],
    x: Tensor,
    heads: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]],
    names: dict[str, str],
    config: dict[str, Any],
    theta: float,
    scale: float = 1.0,
    residual: float = 1.0,
) -> Tensor:
    """The block that Llama and its relatives share; `heads` gives [heads, L, c] of queries, keys and values."""
    eps = config.get("rms_norm_eps", config.get("layer_norm_epsilon"))
    q, k, v = heads(rms(x, w(names["norm"]), eps))
    attended = attend(turned(q, theta, WIDTH, scale), turned(k, theta, WIDTH, scale), v)
    x = x + linear(attended, w(names["out"]), w(names["out"], "bias")) * residual
    h = rms(x, w(names["norm2"]), eps)
    return x + linear(silu(linear(h, w(names["gate"]))) * linear(h, w(names["up"])), w(names["down"])) * residual


LLAMA = {
    "norm": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "out": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


class Reference:
    """A type's tensors by name and its forward pass over token ids."""

    def __init__(
        self,
        config: dict[str, Any],
        shapes: dict[str, tuple[int, ...]],
        forward: Callable[["Reference", Tensor], Tensor],
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        self.config = config
        self.tensors = {
            name: torch.randn(shape, generator=generator) * (0.12 if len(shape) == 2 else 0.3)
            + ("norm" in name or ".ln" in name) * 1.0
            for name, shape in shapes.items()
        }
        self._forward = forward

    def __call__(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            return self._forward(self, ids)

    def at(self, base: str) -> Callable[..., Any]:
        """Reads tensors below a base in float64; None for a bias that is not there."""

        def read(name: str, kind: str = "weight") -> Tensor | None:
            tensor = self.tensors.get(f"{base}{name}.{kind}")
            return None if tensor is None else tensor.double()

        return read

    def save(self, folder: Path, **config: Any) -> Path:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.config | config))
        save_file(
            {name: tensor.contiguous() for name, tensor in self.tensors.items()},
            folder / "model.safetensors",
            {"format": "pt"},
        )
        return folder


def _llama_shapes(
    kv_heads: int,
    *,
    biases: str = "",
) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    shapes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        base = f"model.layers.{layer}."
        for part, rows in (("q", HIDDEN), ("k", kv_heads * WIDTH), ("v", kv_heads * WIDTH), ("o", HIDDEN)):
            shapes[f"{base}self_attn.{part}_proj.weight"] = (rows, HIDDEN)
            if part in biases:
                shapes[f"{base}self_attn.{part}_proj.bias"] = (rows,)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{base}{norm}.weight"] = (HIDDEN,)
        shapes |= {f"{base}mlp.gate_proj.weight": (INNER, HIDDEN), f"{base}mlp.up_proj.weight": (INNER, HIDDEN)}
        shapes[f"{base}mlp.down_proj.weight"] = (HIDDEN, INNER)
    return shapes


def _common(model_type: str, architecture: str, **more: Any) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "architectures": [architecture],
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "auto_map": {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": f"modeling_x.{architecture}"},
    } | more


def _separate(w: Callable[..., Any], kv_heads: int) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
    def heads(h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (linear(h, w(f"self_attn.{part}_proj"), w(f"self_attn.{part}_proj", "bias")) for part in "qkv")
        return cut(q, HEADS), cut(k, kv_heads), cut(v, kv_heads)

    return heads


def _llama(kv_heads: int, theta: float, names: dict[str, str] = LLAMA) -> Callable[[Reference, Tensor], Tensor]:
    def forward(model: Reference, ids: Tensor) -> Tensor:
        whole = model.at("")
        x = whole("model.embed_tokens")[ids]
        for layer in range(LAYERS):
            w = model.at(f"model.layers.{layer}.")
            x = llama_block(w, x, _separate(w, kv_heads), names, model.config, theta)
        return linear(rms(x, whole("model.norm"), model.config["rms_norm_eps"]), whole("lm_head"))

    return forward


def internlm() -> Reference:
    config = _common("internlm", "InternLMForCausalLM", bias=True, rotary={"base": 20000, "type": "dynamic"})
    return Reference(config, _llama_shapes(HEADS, biases="qkvo"), _llama(HEADS, 20000.0))


def internlm2() -> Reference:
    groups = 4
    config = _common(
        "internlm2",
        "InternLM2ForCausalLM",
        num_key_value_heads=groups,
        bias=False,
        rope_theta=1000000,
        rope_scaling={"type": "linear", "factor": 2.0},
        attn_implementation="eager",
    )
    shapes: dict[str, tuple[int, ...]] = {
        "model.tok_embeddings.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "output.weight": (VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        base = f"model.layers.{layer}."
        shapes |= {
            f"{base}attention.wqkv.weight": ((HEADS + 2 * groups) * WIDTH, HIDDEN),
            f"{base}attention.wo.weight": (HIDDEN, HIDDEN),
            f"{base}feed_forward.w1.weight": (INNER, HIDDEN),
            f"{base}feed_forward.w2.weight": (HIDDEN, INNER),
            f"{base}feed_forward.w3.weight": (INNER, HIDDEN),
            f"{base}attention_norm.weight": (HIDDEN,),
            f"{base}ffn_norm.weight": (HIDDEN,),
        }
    names = {
        "norm": "attention_norm",
        "norm2": "ffn_norm",
        "out": "attention.wo",
        "gate": "feed_forward.w1",
        "up": "feed_forward.w3",
        "down": "feed_forward.w2",
    }

    def forward(model: Reference, ids: Tensor) -> Tensor:
        whole = model.at("")
        x = whole("model.tok_embeddings")[ids]
        for layer in range(LAYERS):
            w = model.at(f"model.layers.{layer}.")

            def heads(h: Tensor, w: Callable[..., Any] = w) -> tuple[Tensor, Tensor, Tensor]:
                qkv = linear(h, w("attention.wqkv")).view(len(h), groups, HEADS // groups + 2, WIDTH)
                q = qkv[:, :, :-2].reshape(len(h), HEADS, WIDTH).transpose(0, 1)
                return q, qkv[:, :, -2].transpose(0, 1), qkv[:, :, -1].transpose(0, 1)

            x = llama_block(w, x, heads, names, model.config, 1000000.0, scale=2.0)
        return linear(rms(x, whole("model.norm"), 1e-5), whole("output"))

    return Reference(config, shapes, forward)


def _baichuan(unit: bool, architecture: str) -> Reference:
    config = _common("baichuan", architecture, rms_norm_eps=1e-6, model_max_length=64)
    shapes = {
        name: shape
        for name, shape in _llama_shapes(HEADS).items()
        if not name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
    }
    shapes |= {f"model.layers.{layer}.self_attn.W_pack.weight": (3 * HIDDEN, HIDDEN) for layer in range(LAYERS)}
    shapes |= {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": (WIDTH // 2,) for layer in range(LAYERS)}

    def forward(model: Reference, ids: Tensor) -> Tensor:
        whole = model.at("")
        x = whole("model.embed_tokens")[ids]
        for layer in range(LAYERS):
            w = model.at(f"model.layers.{layer}.")

            def heads(h: Tensor, w: Callable[..., Any] = w) -> tuple[Tensor, Tensor, Tensor]:
                q, k, v = linear(h, w("self_attn.W_pack")).unflatten(-1, (3, HIDDEN)).unbind(-2)
                return cut(q, HEADS), cut(k, HEADS), cut(v, HEADS)

            x = llama_block(w, x, heads, LLAMA, model.config, 10000.0)
        head = whole("lm_head")
        return linear(rms(x, whole("model.norm"), 1e-6), normalize(head) if unit else head)

    return Reference(config, shapes, forward)


def baichuan() -> Reference:
    return _baichuan(False, "BaiChuanForCausalLM")


def baichuan2() -> Reference:
    return _baichuan(True, "BaichuanForCausalLM")


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
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (VOCABULARY, HIDDEN),
        "transformer.ln_f.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        base = f"transformer.h.{layer}."
        shapes |= {
            f"{base}ln_1.weight": (HIDDEN,),
            f"{base}ln_2.weight": (HIDDEN,),
            f"{base}attn.c_attn.weight": (3 * HIDDEN, HIDDEN),
            f"{base}attn.c_attn.bias": (3 * HIDDEN,),
            f"{base}attn.c_proj.weight": (HIDDEN, HIDDEN),
            f"{base}mlp.w1.weight": (INNER, HIDDEN),
            f"{base}mlp.w2.weight": (INNER, HIDDEN),
            f"{base}mlp.c_proj.weight": (HIDDEN, INNER),
        }

    def forward(model: Reference, ids: Tensor) -> Tensor:
        whole = model.at("transformer.")
        x = whole("wte")[ids]
        for layer in range(LAYERS):
            w = model.at(f"transformer.h.{layer}.")
            q, k, v = linear(rms(x, w("ln_1"), 1e-6), w("attn.c_attn"), w("attn.c_attn", "bias")).split(HIDDEN, -1)
            q, k, v = cut(q, HEADS), cut(k, HEADS), cut(v, HEADS)
            x = x + linear(attend(turned(q, 10000.0, WIDTH), turned(k, 10000.0, WIDTH), v), w("attn.c_proj"))
            h = rms(x, w("ln_2"), 1e-6)
            x = x + linear(linear(h, w("mlp.w1")) * silu(linear(h, w("mlp.w2"))), w("mlp.c_proj"))
        return linear(rms(x, whole("ln_f"), 1e-6), model.at("")("lm_head"))

    return Reference(config, shapes, forward)


def minicpm() -> Reference:
    config = _common(
        "minicpm",
        "MiniCPMForCausalLM",
        num_key_value_heads=HEADS,
        scale_emb=12,
        scale_depth=1.4,
        dim_model_base=32,
        tie_word_embeddings=True,
    )
    shapes = {name: shape for name, shape in _llama_shapes(HEADS).items() if name != "lm_head.weight"}

    def forward(model: Reference, ids: Tensor) -> Tensor:
        whole = model.at("")
        x = whole("model.embed_tokens")[ids] * 12
        for layer in range(LAYERS):
            w = model.at(f"model.layers.{layer}.")
            x = llama_block(w, x, _separate(w, HEADS), LLAMA, model.config, 10000.0, residual=1.4 / math.sqrt(LAYERS))
        return linear(rms(x, whole("model.norm"), 1e-5) / (HIDDEN / 32), whole("model.embed_tokens"))

    return Reference(config, shapes, forward)


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
    sizes = {"hidden_size": 96, "num_attention_heads": 12, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    torch.manual_seed(0)
    model = FalconForCausalLM(FalconConfig(**sizes, **shape)).eval()
    randomise(model)
    model.save_pretrained(folder)
    stated = {
        "model_type": name.split(",")[0],
        "architectures": ["RWForCausalLM"],
        "n_head": 12,
        "n_layer": 2,
        "hidden_size": 96,
        "vocab_size": VOCABULARY,
        "layer_norm_epsilon": 1e-5,
        "apply_residual_connection_post_layernorm": False,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(stated | old))
    return model
