"""T5, mT5, UMT5, LongT5 and Switch Transformers with fewer K/V heads than query heads (Ainslie et al. 2023).

This file is part of gqa-convert and is copied into every checkpoint converted from one of these families, so that
transformers loads the checkpoint without gqa-convert. It therefore imports only torch and transformers. Everything
but the attention modules is transformers' own code.

Shape legend: B batch, L queries, S keys, H query heads, N K/V heads, c head_dim. Query head i reads K/V head
i // (H / N).
"""

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import LongT5Config, MT5Config, SwitchTransformersConfig, T5Config, UMT5Config
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.longt5 import modeling_longt5 as longt5
from transformers.models.mt5 import modeling_mt5 as mt5
from transformers.models.switch_transformers import modeling_switch_transformers as switch
from transformers.models.t5 import modeling_t5 as t5
from transformers.models.umt5 import modeling_umt5 as umt5


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


class GroupedT5Attention:
    """T5's attention with N K/V heads: no scaling, and a relative position bias for each query head."""

    @classmethod
    def like(cls, stock: Any) -> Any:
        """A fresh module with the settings of `stock`."""
        return cls(stock.config, stock.has_relative_attention_bias, stock.layer_idx, stock.is_causal)

    def __init__(self, config: Any, has_relative_attention_bias: bool, layer_idx: int | None, is_causal: bool) -> None:
        super().__init__(config, has_relative_attention_bias, layer_idx, is_causal)
        groups = (
            config.num_key_value_heads if config.is_decoder else config.encoder_num_key_value_heads
        ) or self.n_heads
        self.num_key_value_groups = self.n_heads // groups
        self.k = nn.Linear(config.d_model, groups * config.d_kv, bias=False)
        self.v = nn.Linear(config.d_model, groups * config.d_kv, bias=False)

    def split_heads(self, states: Any) -> Any:
        """[B, L, heads * c] -> [B, heads, L, c]."""
        return states.view(*states.shape[:2], -1, self.key_value_proj_dim).transpose(1, 2)

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
        key, value = self.split_heads(self.k(states)), self.split_heads(self.v(states))
        return (key, value) if own is None else own.update(key, value, self.layer_idx)

    def attend(self, states: Any, memory: Any, mask: Any, bias: Any, cache: Any, options: Any) -> tuple[Any, Any, Any]:
        """The output [B, L, d], the position bias [1, H, L, S] for the layers to come, and eager's attention weights.

        Cross-attention has no position bias. Zeros in its place, as in transformers, made its kernel take up to 1.3
        times as long at a decode step on a CPU.
        """
        seen = 0 if cache is None else cache.get_seq_length(self.layer_idx)
        seen = seen.clone() if isinstance(seen, torch.Tensor) else seen  # a static cache updates it in place
        query = self.split_heads(self.q(states))
        key, value = self.keys_and_values(states if memory is None else memory, memory is not None, cache)
        if bias is None and self.has_relative_attention_bias:
            bias = self.compute_bias(query.shape[2], key.shape[2], device=query.device, past_seen_tokens=seen)
        output, weights = grouped_attention(
            self,
            query,
            key,
            value,
            mask,
            self.eager,
            position_bias=bias,
            scaling=1.0,
            dropout=self.dropout if self.training else 0.0,
            **options,
        )
        return self.o(output.reshape(*states.shape[:2], -1)), bias, weights

    def forward(
        self,
        hidden_states: Any,
        mask: Any = None,
        key_value_states: Any = None,
        position_bias: Any = None,
        past_key_values: Any = None,
        **options: Any,
    ) -> tuple[Any, Any, Any]:
        return self.attend(hidden_states, key_value_states, mask, position_bias, past_key_values, options)


class GQAT5Attention(GroupedT5Attention, t5.T5Attention):
    eager = staticmethod(t5.eager_attention_forward)


class GQAMT5Attention(GroupedT5Attention, mt5.MT5Attention):
    eager = staticmethod(mt5.eager_attention_forward)


class GQALongT5Attention(GroupedT5Attention, longt5.LongT5Attention):
    eager = staticmethod(longt5.eager_attention_forward)


class GQASwitchTransformersAttention(GroupedT5Attention, switch.SwitchTransformersAttention):
    eager = staticmethod(switch.eager_attention_forward)


class GQAUMT5Attention(GroupedT5Attention, umt5.UMT5Attention):
    """UMT5, in which every layer has its own position bias."""

    eager = staticmethod(umt5.eager_attention_forward)

    def forward(  # type: ignore[override]
        self,
        hidden_states: Any,
        encoder_hidden_states: Any = None,
        past_key_values: Any = None,
        attention_mask: Any = None,
        **options: Any,
    ) -> tuple[Any, Any]:
        output, _, weights = self.attend(
            hidden_states, encoder_hidden_states, attention_mask, None, past_key_values, options
        )
        return output, weights


@strict
class GQAT5Config(T5Config):
    model_type = "gqa_t5"
    num_key_value_heads: int | None = None
    """K/V heads of the decoder's self-attention and cross-attention; None for as many as query heads."""
    encoder_num_key_value_heads: int | None = None


@strict
class GQAMT5Config(MT5Config):
    model_type = "gqa_mt5"
    num_key_value_heads: int | None = None
    encoder_num_key_value_heads: int | None = None


@strict
class GQAUMT5Config(UMT5Config):
    model_type = "gqa_umt5"
    num_key_value_heads: int | None = None
    encoder_num_key_value_heads: int | None = None


@strict
class GQALongT5Config(LongT5Config):
    model_type = "gqa_longt5"
    num_key_value_heads: int | None = None
    encoder_num_key_value_heads: int | None = None


@strict
class GQASwitchTransformersConfig(SwitchTransformersConfig):
    model_type = "gqa_switch_transformers"
    num_key_value_heads: int | None = None
    encoder_num_key_value_heads: int | None = None


class GroupedModel:
    """Builds transformers' model, then gives its attention modules fewer K/V heads."""

    attention: tuple[Any, Any]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        replace_attention(self, *self.attention)
        self.post_init()


class GroupedT5(GroupedModel):
    attention = (t5.T5Attention, GQAT5Attention)


class GQAT5Model(GroupedT5, t5.T5Model):
    config: GQAT5Config


class GQAT5ForConditionalGeneration(GroupedT5, t5.T5ForConditionalGeneration):
    config: GQAT5Config


class GQAT5EncoderModel(GroupedT5, t5.T5EncoderModel):
    config: GQAT5Config


class GQAT5ForSequenceClassification(GroupedT5, t5.T5ForSequenceClassification):
    config: GQAT5Config


class GQAT5ForQuestionAnswering(GroupedT5, t5.T5ForQuestionAnswering):
    config: GQAT5Config


class GQAT5ForTokenClassification(GroupedT5, t5.T5ForTokenClassification):
    config: GQAT5Config


class GroupedMT5(GroupedModel):
    attention = (mt5.MT5Attention, GQAMT5Attention)


class GQAMT5Model(GroupedMT5, mt5.MT5Model):
    config: GQAMT5Config


class GQAMT5ForConditionalGeneration(GroupedMT5, mt5.MT5ForConditionalGeneration):
    config: GQAMT5Config


class GQAMT5EncoderModel(GroupedMT5, mt5.MT5EncoderModel):
    config: GQAMT5Config


class GQAMT5ForSequenceClassification(GroupedMT5, mt5.MT5ForSequenceClassification):
    config: GQAMT5Config


class GQAMT5ForQuestionAnswering(GroupedMT5, mt5.MT5ForQuestionAnswering):
    config: GQAMT5Config


class GQAMT5ForTokenClassification(GroupedMT5, mt5.MT5ForTokenClassification):
    config: GQAMT5Config


class GroupedUMT5(GroupedModel):
    attention = (umt5.UMT5Attention, GQAUMT5Attention)


class GQAUMT5Model(GroupedUMT5, umt5.UMT5Model):
    config: GQAUMT5Config


class GQAUMT5ForConditionalGeneration(GroupedUMT5, umt5.UMT5ForConditionalGeneration):
    config: GQAUMT5Config


class GQAUMT5EncoderModel(GroupedUMT5, umt5.UMT5EncoderModel):
    config: GQAUMT5Config


class GQAUMT5ForSequenceClassification(GroupedUMT5, umt5.UMT5ForSequenceClassification):
    config: GQAUMT5Config


class GQAUMT5ForQuestionAnswering(GroupedUMT5, umt5.UMT5ForQuestionAnswering):
    config: GQAUMT5Config


class GQAUMT5ForTokenClassification(GroupedUMT5, umt5.UMT5ForTokenClassification):
    config: GQAUMT5Config


class GroupedLongT5(GroupedModel):
    attention = (longt5.LongT5Attention, GQALongT5Attention)


class GQALongT5Model(GroupedLongT5, longt5.LongT5Model):
    config: GQALongT5Config


class GQALongT5ForConditionalGeneration(GroupedLongT5, longt5.LongT5ForConditionalGeneration):
    config: GQALongT5Config


class GQALongT5EncoderModel(GroupedLongT5, longt5.LongT5EncoderModel):
    config: GQALongT5Config


class GroupedSwitchTransformers(GroupedModel):
    attention = (switch.SwitchTransformersAttention, GQASwitchTransformersAttention)


class GQASwitchTransformersModel(GroupedSwitchTransformers, switch.SwitchTransformersModel):
    config: GQASwitchTransformersConfig


class GQASwitchTransformersForConditionalGeneration(
    GroupedSwitchTransformers, switch.SwitchTransformersForConditionalGeneration
):
    config: GQASwitchTransformersConfig


class GQASwitchTransformersEncoderModel(GroupedSwitchTransformers, switch.SwitchTransformersEncoderModel):
    config: GQASwitchTransformersConfig
