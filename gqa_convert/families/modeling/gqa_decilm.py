"""Llama, Mistral or Qwen2 whose layers differ in their number of K/V heads (Ainslie et al. 2023),
as DeciLM.

This file is part of gqa-convert. It is copied, with gqa_common.py, into every checkpoint with a
number of K/V heads for each layer, so that transformers loads the checkpoint without gqa-convert.
Every layer is transformers' Llama, made with the number of K/V heads of that layer.
"""

from typing import Any

from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from .gqa_common import GroupedModel, regroup_layers


class Section(dict):  # type: ignore[type-arg]
    """A dictionary whose values are attributes too, as engines read `block_configs`."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@strict
class DeciLMConfig(LlamaConfig):
    """Llama's config with `block_configs`, an entry for each layer. `qkv_bias`, where it is stated,
    decides about the biases of queries, keys and values, and `attention_bias` about that of the
    output alone.
    """

    model_type = "nemotron-nas"
    block_configs: list[Any] | None = None

    def __post_init__(self, **options):
        self.block_configs = [
            Section({name: Section(section) for name, section in block.items()})
            for block in self.block_configs or []
        ]
        super().__post_init__(**options)


class GroupedLlama(GroupedModel):
    """What is added to transformers' Llama."""

    def regroup(self, config):
        heads = config.num_attention_heads
        regroup_layers(
            self, [heads // block.attention.n_heads_in_group for block in config.block_configs]
        )
        for layer in self.base_model.layers:
            for name in ("q_proj", "k_proj", "v_proj"):
                stock = getattr(layer.self_attn, name)
                bias = getattr(config, "qkv_bias", config.attention_bias)
                setattr(
                    layer.self_attn,
                    name,
                    nn.Linear(stock.in_features, stock.out_features, bias=bias),
                )


class DeciLMModel(GroupedLlama, LlamaModel):
    config_class = DeciLMConfig


class DeciLMForCausalLM(GroupedLlama, LlamaForCausalLM):
    config_class = DeciLMConfig
