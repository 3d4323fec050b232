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
import yaml
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import FalconConfig, FalconForCausalLM

from tests.helpers.tiny import randomise

HEADS, WIDTH, HIDDEN, VOCABULARY, LAYERS = 12, 8, 96, 64, 2

Tensors = dict[str, Tensor]
_STATED = yaml.safe_load(Path(__file__).with_name("remote_types.yaml").read_text())


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


def _stock(name: str, **more: Any) -> Reference:
    """A type whose tensors still have the stock type's names; its K/V heads are as many as its query heads unless stated."""
    sizes = _STATED["sizes"] | {"num_key_value_heads": HEADS, "tie_word_embeddings": False, "rope_theta": 10000.0}
    config = transformers.AutoConfig.for_model(**sizes | _STATED[name]["stock"] | more)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomise(model)
    tensors = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    return Reference(_STATED[name]["config"], tensors, model)


def _rename(name: str, reference: Reference) -> Reference:
    """Give the tensors the names of the type."""
    for old, new in _STATED[name]["names"].items():
        reference.tensors = {key.replace(old, new): tensor for key, tensor in reference.tensors.items()}
    return reference


def _take_qkv(tensors: Tensors, kind: str = "weight") -> Iterator[tuple[str, list[Tensor]]]:
    """Take each layer's queries, keys and values out of the tensors: the layer's name, and the three."""
    for layer in range(LAYERS):
        base = f"model.layers.{layer}."
        yield base, [tensors.pop(f"{base}self_attn.{part}_proj.{kind}") for part in "qkv"]


def internlm2() -> Reference:
    made = _stock("internlm2")
    groups = made.config["num_key_value_heads"]
    for base, parts in _take_qkv(made.tensors):
        rows = torch.cat([part.view(groups, -1, WIDTH, HIDDEN) for part in parts], 1)
        made.tensors[f"{base}attention.wqkv.weight"] = rows.reshape(-1, HIDDEN)
    return _rename("internlm2", made)


def baichuan() -> Reference:
    made = _stock("baichuan")
    for base, parts in _take_qkv(made.tensors):
        made.tensors[f"{base}self_attn.W_pack.weight"] = torch.cat(parts)
        made.tensors[f"{base}self_attn.rotary_emb.inv_freq"] = torch.ones(WIDTH // 2)
    return made


def baichuan2() -> Reference:
    """The code of the second version divides each row of the output layer by its length."""
    made = baichuan()
    made.config = made.config | {"architectures": ["BaichuanForCausalLM"]}
    head = made.model.get_output_embeddings().weight
    head.data = nn.functional.normalize(head.data)
    return made


def qwen() -> Reference:
    made = _stock("qwen")
    for kind in ("weight", "bias"):
        for base, parts in _take_qkv(made.tensors, kind):
            made.tensors[f"{base}attn.c_attn.{kind}"] = torch.cat(parts)
    return _rename("qwen", made)


def minicpm() -> Reference:
    scales = {"residual_multiplier": 1.4 / math.sqrt(LAYERS), "attention_multiplier": 1 / math.sqrt(WIDTH)}
    made = _stock("minicpm", **scales)
    del made.tensors["lm_head.weight"]
    return made


REFERENCES: dict[str, Callable[[], Reference]] = {
    "internlm": lambda: _stock("internlm"),
    "internlm2": internlm2,
    "baichuan": baichuan,
    "baichuan, second version": baichuan2,
    "qwen": qwen,
    "minicpm": minicpm,
}

FIRST_FALCONS = _STATED["first_falcons"]
"""By the old name of the type."""


def write_first_falcon(name: str, folder: Path) -> FalconForCausalLM:
    """A Falcon with the config of the releases before transformers knew the type; the model itself."""
    same = {"hidden_size": HIDDEN, "vocab_size": VOCABULARY}
    sizes = {"num_attention_heads": HEADS, "num_hidden_layers": LAYERS}
    torch.manual_seed(0)
    model = FalconForCausalLM(FalconConfig(**same, **sizes, **FIRST_FALCONS[name]["now"])).eval()
    randomise(model)
    model.save_pretrained(folder)
    stated = {"model_type": name, "architectures": ["RWForCausalLM"], "n_head": HEADS, "n_layer": LAYERS}
    stated |= {"layer_norm_epsilon": 1e-5, "apply_residual_connection_post_layernorm": False, "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(same | stated | FIRST_FALCONS[name]["then"]))
    return model
