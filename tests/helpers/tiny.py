"""Tiny random checkpoints of every supported model type: 12 query heads, and a head_dim that is not hidden_size / heads
where a config has a key for it.

The weights are large enough for attention to matter, biases and norm gains are random, and every expert takes part in
every token, so that no rounding error can flip a routing decision.
"""

import copy
import functools
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from gqa_convert.families.table import FAMILIES, Family

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
    """Draw matrices anew, N(0, 0.12^2); shake the rest, which keeps the decay rates of recurrences sane."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() >= 2 and min(parameter.shape) > 4:
            parameter.copy_(0.12 * noise)
        else:
            parameter.add_(0.2 * noise)


def with_kv_heads(config: Any, family: Family, kv_heads: int) -> Any:
    """Return a copy of a config with another number of K/V heads."""
    config = copy.deepcopy(config)
    for dotted in family.kv_heads_keys:
        *parents, last = dotted.split(".")
        setattr(functools.reduce(getattr, parents, config), last, kv_heads)
    return config


def counted_parameters(config: Any, family: Family) -> set[str]:
    """Names of the parameters that follow the K/V-head count: those that the class shapes otherwise for one K/V head.

    The class itself is asked, so that no table of names can hide the mistake of another; once for each config.
    """
    stated = config.to_dict()
    stated.pop("_name_or_path", None)
    key = f"{type(config).__qualname__} {stated}"
    if key not in _COUNTED:
        _COUNTED[key] = _counted_parameters(config, family)
    return _COUNTED[key]


_COUNTED: dict[str, set[str]] = {}


def _counted_parameters(config: Any, family: Family) -> set[str]:
    shapes = []
    for each in (config, with_kv_heads(config, family, 1)):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(each)
        shapes.append({name: parameter.shape for name, parameter in model.named_parameters()})
    return {name for name, shape in shapes[0].items() if shapes[1].get(name) != shape}


def kv_views(model: nn.Module, family: Family, kv_heads: int) -> list[tuple[str, torch.Tensor]]:
    """Return views [K/V heads, head_dim, ...] of all parameters that count K/V heads."""
    views = []
    for name in sorted(counted_parameters(model.config, family)):
        parameter, (part, last, kind) = model.get_parameter(name), name.rsplit(".", 2)
        if last.isdecimal():  # one tensor per head: they are moved into one, once
            if last == "1":
                siblings = [model.get_parameter(f"{part}.{head}.{kind}") for head in range(kv_heads)]
                stacked = torch.stack([sibling.data for sibling in siblings])
                for sibling, row in zip(siblings, stacked, strict=True):
                    sibling.data = row
                views.append((f"{part}.{kind}", stacked))
        elif last == family.fused:
            width = parameter.shape[0] // (HEADS + 2 * kv_heads)
            rows = zip(("key", "value"), parameter.data[HEADS * width :].chunk(2), strict=True)
            views += [(f"{part}.{role}.{kind}", block.unflatten(0, (kv_heads, -1))) for role, block in rows]
        else:
            views.append((name, parameter.data.unflatten(0, (kv_heads, -1))))
    return views


@torch.no_grad()
def merge_in_place(model: nn.Module, family: Family, kv_heads: int, groups: int, *, strided: bool = False) -> nn.Module:
    """Replace each K/V head by the mean of its group, rounded to the parameters' type.

    Args:
        model: what to change.
        family: its record.
        kv_heads: K/V heads it has.
        groups: groups to merge; neighbouring heads share one.
        strided: heads that are `groups` apart share a group instead, which is wrong.
    """
    for _, heads in kv_views(model, family, kv_heads):
        size = kv_heads // groups
        cut = heads.unflatten(0, (size, groups)).transpose(0, 1) if strided else heads.unflatten(0, (groups, size))
        cut.copy_(cut.double().mean(dim=1, keepdim=True).expand_as(cut))
    return model


def make_checkpoint(
    model_type: str,
    folder: Path,
    *,
    kv_heads: int = HEADS,
    dtype: torch.dtype = torch.float32,
    shards: str | int = "100KB",
    tied: int | None = None,
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
        tied: make the heads of each of so many groups equal.
        seed: of the weights.
        overrides: further config values.

    Returns:
        The folder.
    """
    model = make_model(make_config(model_type, kv_heads=kv_heads, **overrides), seed=seed).to(dtype)
    if tied:
        merge_in_place(model, FAMILIES[model_type], kv_heads, tied)
    model.save_pretrained(folder, max_shard_size=shards)
    return folder
