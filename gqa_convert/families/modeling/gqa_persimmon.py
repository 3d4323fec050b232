"""Persimmon with fewer K/V heads than query heads (Ainslie et al. 2023).

This file is part of gqa-convert and is copied into every checkpoint converted from this family, so that transformers
loads the checkpoint without gqa-convert. It therefore imports only torch and transformers.
Everything but the attention module is transformers' own code.

Shape legend: B batch, L queries, S keys, H query heads, N K/V heads, c head_dim. Query head i reads K/V head
i // (H / N).
"""

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import AutoModel, PersimmonConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.persimmon import modeling_persimmon as persimmon


# Shared part: begin (written by gqa_convert.families.modeling.generate from shared.py)
def pack_heads(states: Any, groups: int) -> Any:
    """[B, H, L, x] -> [B, N, H / N * L, x]: the query heads of a group move into the length axis. An array with one
    head is returned unchanged, because it broadcasts.
    """
    if states.shape[1] == 1:
        return states
    return states.reshape(states.shape[0], groups, -1, states.shape[-1])


def grouped_attention(
    module: nn.Module,
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    eager: Any,
    *,
    position_bias: Any = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Grouped-query attention through the configured attention function.

    Where keys and values would be repeated in memory (always with eager attention, and with sdpa while decoding), the
    query heads of a group are packed into the length axis instead, which gives the same sums from H / N times fewer
    bytes.

    Args:
        module: the attention module; its `num_key_value_groups` is H / N.
        query: [B, H, L, c].
        key: [B, N, S, c].
        value: [B, N, S, c].
        mask: None, or broadcasting to [B, H, L, S], boolean or additive.
        eager: the family's eager attention function, which needs as many keys and values as query heads.
        position_bias: None, or added to the scores, broadcasting to [B, H, L, S].
        options: `scaling`, `dropout` and further arguments of the function.

    Returns:
        The output [B, L, H, c] and, from eager attention, the attention weights [B, H, L, S].
    """
    kind = module.config._attn_implementation
    batch, heads, length, _ = query.shape
    groups = key.shape[1]
    size, rest = divmod(heads, groups)
    if rest:
        raise ValueError(f"{groups} K/V heads do not divide {heads} query heads")
    paged = options.get("cache") is not None  # continuous batching: the attention function itself updates the cache
    packs = size > 1 and not paged and (kind == "eager" or (kind == "sdpa" and length == 1))
    if packs:
        query = pack_heads(query, groups)
        if position_bias is not None:
            position_bias = pack_heads(position_bias, groups)
        if mask is not None:
            mask = mask.repeat(1, 1, size, 1) if mask.shape[1] == 1 and mask.shape[2] > 1 else pack_heads(mask, groups)
    if packs and kind == "sdpa":
        if position_bias is not None and mask is not None:
            lowest = torch.finfo(query.dtype).min
            mask = torch.where(mask, position_bias, lowest) if mask.dtype == torch.bool else mask + position_bias
        output = nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            position_bias if mask is None else mask,
            options.get("dropout", 0.0),
            scale=options.get("scaling"),
        )
        return output.reshape(batch, heads, length, -1).transpose(1, 2), None
    if position_bias is not None:
        options["position_bias"] = position_bias
    function = ALL_ATTENTION_FUNCTIONS.get_interface(kind, eager)
    output, weights = function(module, query, key, value, mask, **options)
    if packs:
        output = output.transpose(1, 2).reshape(batch, heads, length, -1).transpose(1, 2)
        weights = weights.reshape(batch, heads, length, -1)
    return output, weights


def replace_attention(model: nn.Module, stock: type[nn.Module], grouped: Any) -> None:
    """Replace every attention module of type `stock` by `grouped.like(module)`, which may have fewer K/V heads."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is stock:
                setattr(parent, name, grouped.like(child))


# Shared part: end


class GQAPersimmonAttention(persimmon.PersimmonAttention):
    """Persimmon's attention with N K/V heads. The rows of `query_key_value` are [q | k | v], each head by head."""

    @classmethod
    def like(cls, stock: Any) -> Any:
        """A fresh module with the settings of `stock`."""
        return cls(stock.config, stock.layer_idx)

    def __init__(self, config: Any, layer_idx: int | None = None) -> None:
        super().__init__(config, layer_idx)
        groups = config.num_key_value_heads or self.num_heads
        self.num_key_value_groups = self.num_heads // groups
        self.widths = [self.hidden_size, groups * self.head_dim, groups * self.head_dim]
        self.query_key_value = nn.Linear(self.hidden_size, sum(self.widths), bias=True)

    def rotated(self, query: Any, key: Any, cos: Any, sin: Any) -> tuple[Any, Any]:
        """Query and key with the first `rotary_ndims` of each head rotated."""
        sizes = [self.rotary_ndims, self.head_dim - self.rotary_ndims]
        (query, query_rest), (key, key_rest) = query.split(sizes, dim=-1), key.split(sizes, dim=-1)
        query, key = persimmon.apply_rotary_pos_emb(query, key, cos, sin)
        return torch.cat((query, query_rest), dim=-1), torch.cat((key, key_rest), dim=-1)

    def forward(
        self,
        hidden_states: Any,
        attention_mask: Any = None,
        past_key_values: Any = None,
        position_embeddings: Any = None,
        **options: Any,
    ) -> tuple[Any, Any]:
        shape = hidden_states.shape[:-1]
        query, key, value = (
            states.view(*shape, -1, self.head_dim)
            for states in self.query_key_value(hidden_states).split(self.widths, dim=-1)
        )
        if self.qk_layernorm:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        query, key = self.rotated(query.transpose(1, 2), key.transpose(1, 2), *position_embeddings)
        value = value.transpose(1, 2)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        output, weights = grouped_attention(
            self,
            query,
            key,
            value,
            attention_mask,
            persimmon.eager_attention_forward,
            scaling=self.scaling,
            dropout=self.config.attention_dropout if self.training else 0.0,
            **options,
        )
        return self.dense(output.reshape(*shape, -1)), weights


@strict
class GQAPersimmonConfig(PersimmonConfig):
    model_type = "gqa_persimmon"
    num_key_value_heads: int | None = None
    """None for as many as query heads."""


class GroupedModel(persimmon.PersimmonPreTrainedModel):
    """Builds transformers' model, then gives its attention modules fewer K/V heads."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        replace_attention(self, persimmon.PersimmonAttention, GQAPersimmonAttention)
        self.post_init()


class GQAPersimmonModel(GroupedModel, persimmon.PersimmonModel):
    config: GQAPersimmonConfig


class GQAPersimmonForCausalLM(GroupedModel, persimmon.PersimmonForCausalLM):
    config: GQAPersimmonConfig


class GQAPersimmonForSequenceClassification(GroupedModel, persimmon.PersimmonForSequenceClassification):
    config: GQAPersimmonConfig


class GQAPersimmonForTokenClassification(GroupedModel, persimmon.PersimmonForTokenClassification):
    config: GQAPersimmonConfig


# The classification models ask AutoModel for the model below their head.
AutoModel.register(GQAPersimmonConfig, GQAPersimmonModel, exist_ok=True)
