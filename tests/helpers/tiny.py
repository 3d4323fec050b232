"""Tiny random checkpoints of every supported model type: 12 query heads, and a head_dim that is not
hidden_size / heads where a config has a key for it.

The weights are large enough for attention to matter, biases and norm gains are random, and every
expert takes part in every token, so that no rounding error can flip a routing decision.
"""

import copy
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

HEADS = 12
VOCAB = 64

_SIZES = yaml.safe_load(Path(__file__).with_name("tiny.yaml").read_text())


def make_config(model_type: str, *, kv_heads: int = HEADS, **overrides: Any) -> Any:
    """The config of a tiny model.

    Args:
        model_type: a key of transformers' table.
        kv_heads: K/V heads per layer.
        overrides: further config values.
    """
    cls = CONFIG_MAPPING[model_type]
    known = {name for base in cls.__mro__ for name in getattr(base, "__annotations__", {})}
    values = {key: value for key, value in _SIZES["all"].items() if key in known}
    values |= copy.deepcopy(_SIZES["types"].get(model_type, {}))
    if model_type == "dbrx":
        values["attn_config"]["kv_n_heads"] = kv_heads
    else:
        values["num_key_value_heads"] = kv_heads
    return cls(**(values | overrides))


def make_model(config: Any, *, seed: int = 0) -> nn.Module:
    """A model with random weights, biases and gains."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomise(model, seed)
    return model


@torch.no_grad()
def randomise(model: nn.Module, seed: int = 0) -> None:
    """Draw matrices anew, N(0, 0.12^2); shake the rest, which keeps the decay rates of
    recurrences sane.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() >= 2 and min(parameter.shape) > 4:
            parameter.copy_(0.12 * noise)
        else:
            parameter.add_(0.2 * noise)


def make_checkpoint(
    model_type: str,
    folder: Path,
    *,
    kv_heads: int = HEADS,
    dtype: torch.dtype = torch.float32,
    shards: str | int = "100KB",
    seed: int = 0,
    **overrides: Any,
) -> Path:
    """Save a tiny random model in several shards.

    Args:
        model_type: a key of transformers' table.
        folder: where to.
        kv_heads: K/V heads per layer.
        dtype: of the weights.
        shards: size of a shard, at most.
        seed: of the weights.
        overrides: further config values.

    Returns:
        The folder.
    """
    model = make_model(make_config(model_type, kv_heads=kv_heads, **overrides), seed=seed).to(dtype)
    model.save_pretrained(folder, max_shard_size=shards)
    return folder
