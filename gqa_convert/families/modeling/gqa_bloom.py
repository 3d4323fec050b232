"""BLOOM with fewer K/V heads than query heads (Ainslie et al. 2023).

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
from transformers import BloomConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bloom import modeling_bloom as bloom


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
    """BLOOM's attention: the scores are added to ALiBi in one rounding, and their softmax is taken in float32."""
    scores = position_bias.flatten(0, 1).baddbmm(query.flatten(0, 1), key.flatten(0, 1).transpose(1, 2), alpha=scaling)
    scores = scores.view(*query.shape[:3], -1)
    if mask is not None:
        scores = scores + mask
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2), weights


class GQABloomAttention(bloom.BloomAttention):
    """BLOOM's attention with N K/V heads, and ALiBi for each query head. The rows of `query_key_value` are [q | k |
    v].
    """

    def __init__(self, config: Any, layer_idx: int | None = None) -> None:
        super().__init__(config, layer_idx)
        self.config = config
        groups = config.num_key_value_heads or self.num_heads
        self.num_key_value_groups = self.num_heads // groups
        self.is_causal = True
        self.widths = [self.hidden_size, groups * self.head_dim, groups * self.head_dim]
        self.query_key_value = nn.Linear(self.hidden_size, sum(self.widths), bias=True)

    def project(self, states: Any) -> Any:
        """The output projection, if asked for summed over slices and without bias, as BLOOM was trained."""
        if self.pretraining_tp > 1 and self.slow_but_exact:
            slices = zip(
                states.chunk(self.pretraining_tp, -1), self.dense.weight.chunk(self.pretraining_tp, -1), strict=True
            )
            return sum(nn.functional.linear(part, weight) for part, weight in slices)
        return self.dense(states)

    def forward(
        self,
        hidden_states: Any,
        residual: Any,
        alibi: Any,
        attention_mask: Any,
        layer_past: Any = None,
        **_options: Any,
    ) -> tuple[Any, Any]:
        batch, length, _ = hidden_states.shape
        query, key, value = (
            states.view(batch, length, -1, self.head_dim).transpose(1, 2)
            for states in self.query_key_value(hidden_states).split(self.widths, dim=-1)
        )
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        output, weights = grouped_attention(
            self,
            query,
            key,
            value,
            attention_mask,
            eager_attention,
            scaling=self.inv_norm_factor,
            position_bias=alibi.view(batch, self.num_heads, 1, -1).expand(-1, -1, length, -1),
            dropout=self.attention_dropout.p if self.training else 0.0,
        )
        output = self.project(output.reshape(batch, length, -1))
        return bloom.dropout_add(output, residual, self.hidden_dropout, self.training), weights


@strict
class GQABloomConfig(BloomConfig):
    model_type = "gqa_bloom"
    num_key_value_heads: int | None = None
    """None for as many as query heads."""


class GroupedModel(bloom.BloomPreTrainedModel):
    """Builds transformers' model, then gives its attention modules fewer K/V heads, and sdpa attention where that is
    asked for.
    """

    _supports_sdpa = True

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True  # transformers would look in a source file, or ask its own class

    def __init__(self, config: Any) -> None:
        kind, config._attn_implementation = (
            config._attn_implementation,
            "eager",
        )  # the only kind that transformers' model accepts
        super().__init__(config)
        replace_attention(
            self, bloom.BloomAttention, SimpleNamespace(like=lambda stock: GQABloomAttention(config, stock.layer_idx))
        )
        self.post_init()
        self.set_attn_implementation(kind or "eager")


class GQABloomModel(GroupedModel, bloom.BloomModel):
    config: GQABloomConfig


class GQABloomForCausalLM(GroupedModel, bloom.BloomForCausalLM):
    config: GQABloomConfig


class GQABloomForSequenceClassification(GroupedModel, bloom.BloomForSequenceClassification):
    config: GQABloomConfig


class GQABloomForTokenClassification(GroupedModel, bloom.BloomForTokenClassification):
    config: GQABloomConfig


class GQABloomForQuestionAnswering(GroupedModel, bloom.BloomForQuestionAnswering):
    config: GQABloomConfig
