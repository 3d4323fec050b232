"""Falcon with fewer K/V heads than query heads (Ainslie et al. 2023).

This file is part of gqa-convert and is copied into every checkpoint converted from this family, so that transformers
loads the checkpoint without gqa-convert. It therefore imports only torch and transformers.
Everything but the attention module is transformers' own code.

Shape legend: B batch, L queries, S keys, H query heads, N K/V heads, c head_dim. Query head i reads K/V head
i // (H / N).
"""

import math
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import FalconConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.falcon import modeling_falcon as falcon


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
    position_bias: Any = None,
    scaling: float,
    dropout: float,
    **_options: Any,
) -> tuple[Any, Any]:
    """Falcon's attention: ALiBi is scaled with the scores, and the softmax is taken in the type of the states."""
    scores = query @ key.transpose(-1, -2)
    if position_bias is None:
        scores = scores / math.sqrt(module.head_dim)
    else:
        half = scores.dtype in (torch.float16, torch.bfloat16)
        scores = ((scores.float() if half else scores) + position_bias) * scaling
    weights = nn.functional.softmax(scores + mask, dim=-1, dtype=query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2), weights


class GQAFalconAttention(falcon.FalconAttention):
    """Falcon's attention with N K/V heads, also in the cache. The rows of `query_key_value` are [q | k | v], each head
    by head.
    """

    @classmethod
    def like(cls, stock: Any) -> Any:
        """A fresh module with the settings of `stock`."""
        return cls(stock.config, stock.layer_idx)

    def __init__(self, config: Any, layer_idx: int | None = None) -> None:
        super().__init__(config, layer_idx)
        self.num_kv_heads = config.num_key_value_heads or self.num_heads
        self.num_key_value_groups = self.num_heads // self.num_kv_heads
        self.widths = [self.hidden_size, self.num_kv_heads * self.head_dim, self.num_kv_heads * self.head_dim]
        self.query_key_value = falcon.FalconLinear(self.hidden_size, sum(self.widths), bias=config.bias)

    def forward(
        self,
        hidden_states: Any,
        alibi: Any,
        attention_mask: Any,
        position_ids: Any = None,
        layer_past: Any = None,
        position_embeddings: Any = None,
        **_options: Any,
    ) -> tuple[Any, Any]:
        kind = self.config._attn_implementation
        if alibi is not None and kind not in ("eager", "sdpa"):
            raise ValueError(f"Falcon with ALiBi runs with eager or sdpa attention, not {kind}")
        batch, length, _ = hidden_states.shape
        query, key, value = (
            states.view(batch, length, -1, self.head_dim).transpose(1, 2)
            for states in self.query_key_value(hidden_states).split(self.widths, dim=-1)
        )
        if alibi is None:
            query, key = falcon.apply_rotary_pos_emb(query, key, *position_embeddings)
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        bias = None
        if alibi is not None and kind == "eager":  # sdpa has ALiBi in the mask
            bias = alibi.view(batch, self.num_heads, 1, -1).expand(-1, -1, length, -1)
        # Eager and sdpa attention of rotary Falcon have no dropout.
        drops = self.training and (alibi is not None or kind not in ("eager", "sdpa"))
        output, weights = grouped_attention(
            self,
            query,
            key,
            value,
            attention_mask,
            eager_attention,
            position_bias=bias,
            scaling=self.inv_norm_factor,
            dropout=self.attention_dropout.p if drops else 0.0,
            position_ids=position_ids,
        )
        return self.dense(output.reshape(batch, length, -1)), weights


@strict
class GQAFalconConfig(FalconConfig):
    model_type = "gqa_falcon"
    num_key_value_heads: int | None = None
    """None for as many as query heads, whatever `multi_query` and `new_decoder_architecture` say, which then stand for
    the norms only.
    """

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.num_kv_heads = self.num_key_value_heads or self.num_attention_heads


class GroupedModel(falcon.FalconPreTrainedModel):
    """Builds transformers' model, then gives its attention modules fewer K/V heads and a choice of attention
    functions.
    """

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True  # transformers would look in a source file, or ask its own class

    def __init__(self, config: Any) -> None:
        requested = config._attn_implementation
        config._attn_implementation = "eager"  # the only kind that transformers' constructors always accept
        super().__init__(config)
        replace_attention(self, falcon.FalconAttention, GQAFalconAttention)
        config._attn_implementation = self._check_and_adjust_attn_implementation(requested, is_init_check=True)
        self.post_init()


class GQAFalconModel(GroupedModel, falcon.FalconModel):
    config: GQAFalconConfig


class GQAFalconForCausalLM(GroupedModel, falcon.FalconForCausalLM):
    config: GQAFalconConfig


class GQAFalconForSequenceClassification(GroupedModel, falcon.FalconForSequenceClassification):
    config: GQAFalconConfig


class GQAFalconForTokenClassification(GroupedModel, falcon.FalconForTokenClassification):
    config: GQAFalconConfig


class GQAFalconForQuestionAnswering(GroupedModel, falcon.FalconForQuestionAnswering):
    config: GQAFalconConfig
