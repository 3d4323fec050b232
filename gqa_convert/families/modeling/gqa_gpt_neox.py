"""GPT-NeoX with fewer K/V heads than query heads (Ainslie et al. 2023).

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
from transformers import GPTNeoXConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt_neox import modeling_gpt_neox as neox


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


class GQAGPTNeoXAttention(neox.GPTNeoXAttention):
    """GPT-NeoX's attention with N K/V heads. The rows of `query_key_value` are [q | k | v], each head by head."""

    @classmethod
    def like(cls, stock: Any) -> Any:
        """A fresh module with the settings of `stock`."""
        return cls(stock.config, stock.layer_idx)

    def __init__(self, config: Any, layer_idx: int | None = None) -> None:
        super().__init__(config, layer_idx)
        groups = config.num_key_value_heads or config.num_attention_heads
        self.num_key_value_groups = config.num_attention_heads // groups
        self.widths = [config.hidden_size, groups * self.head_size, groups * self.head_size]
        self.query_key_value = nn.Linear(config.hidden_size, sum(self.widths), bias=config.attention_bias)

    def forward(
        self,
        hidden_states: Any,
        attention_mask: Any,
        layer_past: Any = None,
        position_embeddings: Any = None,
        **options: Any,
    ) -> tuple[Any, Any]:
        shape = hidden_states.shape[:-1]
        query, key, value = (
            states.view(*shape, -1, self.head_size).transpose(1, 2)
            for states in self.query_key_value(hidden_states).split(self.widths, dim=-1)
        )
        query, key = neox.apply_rotary_pos_emb(query, key, *position_embeddings)
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        output, weights = grouped_attention(
            self,
            query,
            key,
            value,
            attention_mask,
            neox.eager_attention_forward,
            scaling=self.scaling,
            dropout=self.attention_dropout if self.training else 0.0,
            **options,
        )
        return self.dense(output.reshape(*shape, -1)), weights


@strict
class GQAGPTNeoXConfig(GPTNeoXConfig):
    model_type = "gqa_gpt_neox"
    num_key_value_heads: int | None = None
    """None for as many as query heads."""


class GroupedModel(neox.GPTNeoXPreTrainedModel):
    """Builds transformers' model, then gives its attention modules fewer K/V heads."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        replace_attention(self, neox.GPTNeoXAttention, GQAGPTNeoXAttention)
        self.post_init()


class GQAGPTNeoXModel(GroupedModel, neox.GPTNeoXModel):
    config: GQAGPTNeoXConfig


class GQAGPTNeoXForCausalLM(GroupedModel, neox.GPTNeoXForCausalLM):
    config: GQAGPTNeoXConfig


class GQAGPTNeoXForSequenceClassification(GroupedModel, neox.GPTNeoXForSequenceClassification):
    config: GQAGPTNeoXConfig


class GQAGPTNeoXForTokenClassification(GroupedModel, neox.GPTNeoXForTokenClassification):
    config: GQAGPTNeoXConfig


class GQAGPTNeoXForQuestionAnswering(GroupedModel, neox.GPTNeoXForQuestionAnswering):
    config: GQAGPTNeoXConfig


# Checkpoints call the output layer `embed_out`, transformers calls it `lm_head` and translates for its own classes
# only.
register_checkpoint_conversion_mapping(
    "GQAGPTNeoXForCausalLM", get_checkpoint_conversion_mapping("GPTNeoXForCausalLM") or [], overwrite=True
)
