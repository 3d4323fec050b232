"""MPT with fewer K/V heads than query heads (Ainslie et al. 2023).

This file is part of gqa-convert and is copied into every checkpoint converted from this family, so that transformers
loads the checkpoint without gqa-convert. It therefore imports only torch and transformers.
Everything but the attention module is transformers' own code.

Shape legend: B batch, L queries, S keys, H query heads, N K/V heads, c head_dim. Query head i reads K/V head
i // (H / N).
"""

from types import SimpleNamespace
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import MptConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.mpt import modeling_mpt as mpt


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


def eager_attention(
    module: nn.Module,
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    *,
    position_bias: Any,
    scaling: float,
    dropout: float,
    **_options: Any,
) -> tuple[Any, Any]:
    """MPT's attention. The mask is boolean and true where a query must not look."""
    scores = query @ key.transpose(-1, -2) * scaling + position_bias
    if mask is not None:
        scores = scores.masked_fill(mask, torch.finfo(query.dtype).min)
    weights = nn.functional.softmax(scores.float(), dim=-1).to(value.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2), weights


class GQAMptAttention(mpt.MptAttention):
    """MPT's attention with N K/V heads, and ALiBi for each query head. The rows of `Wqkv` are [q | k | v], each head by
    head.
    """

    def __init__(self, config: Any, layer_idx: int | None = None) -> None:
        super().__init__(config, layer_idx)
        self.config = config
        groups = config.num_key_value_heads or self.n_heads
        self.num_key_value_groups = self.n_heads // groups
        self.widths = [self.hidden_size, groups * self.head_dim, groups * self.head_dim]
        self.Wqkv = nn.Linear(self.hidden_size, sum(self.widths), bias=False)

    def forward(
        self,
        hidden_states: Any,
        position_bias: Any,
        past_key_values: Any = None,
        attention_mask: Any = None,
        **_options: Any,
    ) -> tuple[Any, Any]:
        batch, length, _ = hidden_states.shape
        states = self.Wqkv(hidden_states)
        if self.clip_qkv:
            states = states.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        query, key, value = (
            part.view(batch, length, -1, self.head_dim).transpose(1, 2) for part in states.split(self.widths, dim=-1)
        )
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        # ALiBi [H, 1, longest] counts back from its end.
        bias = position_bias[None, :, :, -key.shape[2] :].expand(-1, -1, length, -1)
        output, weights = grouped_attention(
            self,
            query,
            key,
            value,
            attention_mask,
            eager_attention,
            position_bias=bias,
            scaling=self.softmax_scale,
            dropout=self.attn_dropout_p if self.training else 0.0,
        )
        return self.out_proj(output.reshape(batch, length, -1)), weights


@strict
class GQAMptConfig(MptConfig):
    model_type = "gqa_mpt"
    num_key_value_heads: int | None = None
    """None for as many as query heads."""


class GroupedModel(mpt.MptPreTrainedModel):
    """Builds transformers' model, then gives its attention modules fewer K/V heads."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        replace_attention(
            self, mpt.MptAttention, SimpleNamespace(like=lambda stock: GQAMptAttention(config, stock.layer_idx))
        )
        self.post_init()


class GQAMptModel(GroupedModel, mpt.MptModel):
    config: GQAMptConfig


class GQAMptForCausalLM(GroupedModel, mpt.MptForCausalLM):
    config: GQAMptConfig


class GQAMptForSequenceClassification(GroupedModel, mpt.MptForSequenceClassification):
    config: GQAMptConfig


class GQAMptForTokenClassification(GroupedModel, mpt.MptForTokenClassification):
    config: GQAMptConfig


class GQAMptForQuestionAnswering(GroupedModel, mpt.MptForQuestionAnswering):
    config: GQAMptConfig
