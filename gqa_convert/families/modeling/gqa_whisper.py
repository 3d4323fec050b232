"""Whisper with fewer K/V heads than query heads (Ainslie et al. 2023).

This file is part of gqa-convert and is copied into every checkpoint converted from this family, so that transformers
loads the checkpoint without gqa-convert. It therefore imports only torch and transformers.
Everything but the attention modules is transformers' own code.

Shape legend: B batch, L queries, S keys, H query heads, N K/V heads, c head_dim. Query head i reads K/V head
i // (H / N).
"""

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import WhisperConfig
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.whisper import modeling_whisper as whisper


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


class GQAWhisperAttention(whisper.WhisperAttention):
    """Whisper's attention with N K/V heads: keys have no bias, and the queries rather than the scores are scaled."""

    eager = staticmethod(whisper.eager_attention_forward)

    @classmethod
    def like(cls, stock: Any) -> Any:
        """A fresh module with the settings of `stock`."""
        return cls(
            stock.embed_dim,
            stock.num_heads,
            stock.dropout,
            stock.is_decoder,
            stock.q_proj.bias is not None,
            stock.is_causal,
            config=stock.config,
            layer_idx=stock.layer_idx,
        )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.config
        groups = (
            config.num_key_value_heads if self.is_decoder else config.encoder_num_key_value_heads
        ) or self.num_heads
        if self.num_heads % groups:
            raise ValueError(f"{groups} K/V heads do not divide {self.num_heads} query heads")
        self.num_key_value_groups = self.num_heads // groups
        self.k_proj = nn.Linear(self.embed_dim, groups * self.head_dim, bias=False)
        self.v_proj = nn.Linear(self.embed_dim, groups * self.head_dim, bias=self.q_proj.bias is not None)

    def split_heads(self, states: Any) -> Any:
        """[B, L, heads * c] -> [B, heads, L, c]."""
        return states.view(*states.shape[:2], -1, self.head_dim).transpose(1, 2)

    def keys_and_values(self, states: Any, is_cross: bool, cache: Any) -> tuple[Any, Any]:
        """Keys and values [B, N, S, c] of `states`, or of the encoder's output as it was cached, with what the cache
        holds before.
        """
        if not isinstance(cache, EncoderDecoderCache):
            own = cache
        else:
            own = cache.cross_attention_cache if is_cross else cache.self_attention_cache
            if is_cross and cache.is_updated.get(self.layer_idx):
                return own.layers[self.layer_idx].keys, own.layers[self.layer_idx].values
            if is_cross:
                cache.is_updated[self.layer_idx] = True
        key, value = self.split_heads(self.k_proj(states)), self.split_heads(self.v_proj(states))
        return (key, value) if own is None else own.update(key, value, self.layer_idx)

    def forward(
        self,
        hidden_states: Any,
        key_value_states: Any = None,
        past_key_values: Any = None,
        attention_mask: Any = None,
        **options: Any,
    ) -> tuple[Any, Any]:
        is_cross = key_value_states is not None
        query = self.split_heads(self.q_proj(hidden_states) * self.scaling)
        key, value = self.keys_and_values(key_value_states if is_cross else hidden_states, is_cross, past_key_values)
        output, weights = grouped_attention(
            self,
            query,
            key,
            value,
            attention_mask,
            self.eager,
            scaling=1.0,
            dropout=self.dropout if self.training else 0.0,
            **options,
        )
        return self.out_proj(output.reshape(*hidden_states.shape[:2], -1)), weights


@strict
class GQAWhisperConfig(WhisperConfig):
    model_type = "gqa_whisper"
    # Whisper's own makes num_key_value_heads another name of encoder_attention_heads.
    attribute_map = {  # noqa: RUF012
        name: other for name, other in WhisperConfig.attribute_map.items() if name != "num_key_value_heads"
    }
    num_key_value_heads: int | None = None
    """K/V heads of the decoder's self-attention and cross-attention; None for as many as query heads."""
    encoder_num_key_value_heads: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        # generate() and the speech recognition pipeline ask whether this is Whisper. What is saved is the class's model
        # type.
        self.model_type = WhisperConfig.model_type


class GroupedModel:
    """Builds transformers' model, then gives its attention modules fewer K/V heads."""

    attention: tuple[Any, Any]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        replace_attention(self, *self.attention)
        self.post_init()


class GroupedWhisper(GroupedModel):
    attention = (whisper.WhisperAttention, GQAWhisperAttention)


class GQAWhisperModel(GroupedWhisper, whisper.WhisperModel):
    config: GQAWhisperConfig


class GQAWhisperForConditionalGeneration(GroupedWhisper, whisper.WhisperForConditionalGeneration):
    config: GQAWhisperConfig


class GQAWhisperForCausalLM(GroupedWhisper, whisper.WhisperForCausalLM):
    config: GQAWhisperConfig


class GQAWhisperForAudioClassification(GroupedWhisper, whisper.WhisperForAudioClassification):
    config: GQAWhisperConfig
