"""CodeGen with fewer K/V heads than query heads (Ainslie et al. 2023).

This file is part of gqa-convert and is copied into every checkpoint converted from this family, so that transformers
loads the checkpoint without gqa-convert. It therefore imports only torch and transformers.
Everything but the attention modules is transformers' own code.

Shape legend: B batch, L queries, S keys, H query heads, N K/V heads, c head_dim. Query head i reads K/V head
i // (H / N).
"""

from types import SimpleNamespace
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import CodeGenConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.codegen import modeling_codegen as codegen


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


def eager_attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **_: Any) -> tuple[Any, Any]:
    """CodeGen's own attention, scores in float32."""
    output, weights = module._attn(query, key, value, mask)
    return output.transpose(1, 2), weights


class GQACodeGenAttention(codegen.CodeGenAttention):
    """CodeGen's attention with N K/V heads, through the configured attention function.

    The rows of `qkv_proj` are [q | k | v], one head after the other, where CodeGen has four blocks of [q | v | k]: with
    fewer K/V heads than blocks there would be nothing to put into some of them.
    """

    def __init__(self, config: Any, layer_idx: int | None = None) -> None:
        super().__init__(config, layer_idx)
        self.config = config
        self.is_causal = True
        groups = config.num_key_value_heads or self.num_attention_heads
        self.num_key_value_groups = self.num_attention_heads // groups
        self.widths = (self.embed_dim, groups * self.head_dim, groups * self.head_dim)
        self.qkv_proj = nn.Linear(self.embed_dim, sum(self.widths), bias=False)

    def split_heads(self, states: Any) -> Any:
        """[B, L, heads * c] -> [B, L, heads, c]."""
        return states.view(*states.shape[:2], -1, self.head_dim)

    def rotate(self, states: Any, position_ids: Any) -> Any:
        """[B, L, heads, c] -> [B, heads, L, c], the first `rotary_dim` dimensions rotated, in neighbouring pairs and in
        float32.
        """
        sin, cos = self.embed_positions.to(states.device)[position_ids].chunk(2, dim=-1)
        turned = codegen.apply_rotary_pos_emb(states[..., : self.rotary_dim], sin, cos)
        return torch.cat((turned, states[..., self.rotary_dim :]), dim=-1).transpose(1, 2)

    def forward(
        self,
        hidden_states: Any,
        layer_past: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        **options: Any,
    ) -> tuple[Any, Any]:
        query, key, value = (
            self.split_heads(states) for states in self.qkv_proj(hidden_states).split(self.widths, dim=-1)
        )
        query, key, value = self.rotate(query, position_ids), self.rotate(key, position_ids), value.transpose(1, 2)
        if self.config._attn_implementation != "eager":  # all functions but eager need a single dtype
            query, key = query.to(value.dtype), key.to(value.dtype)
        if layer_past is not None:
            key, value = layer_past.update(key.to(hidden_states.dtype), value, self.layer_idx)
        output, weights = grouped_attention(
            self,
            query,
            key,
            value,
            attention_mask,
            eager_attention,
            scaling=1 / self.scale_attn,
            dropout=self.attn_dropout.p if self.training else 0.0,
            **options,
        )
        return self.resid_dropout(self.out_proj(output.reshape(*hidden_states.shape[:2], -1))), weights


@strict
class GQACodeGenConfig(CodeGenConfig):
    model_type = "gqa_codegen"
    num_key_value_heads: int | None = None
    """K/V heads; None for as many as query heads."""


class GroupedModel:
    """Builds transformers' model, then gives its attention modules fewer K/V heads and a choice of attention
    functions.
    """

    _supports_sdpa = True

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True  # transformers would look in a source file, or ask its own class

    def __init__(self, config: Any) -> None:
        requested = config._attn_implementation
        config._attn_implementation = "eager"  # the only kind that transformers' constructors accept
        super().__init__(config)
        grouped = SimpleNamespace(
            like=lambda stock: GQACodeGenAttention(config, stock.layer_idx)
        )  # CodeGen's attention keeps no config
        replace_attention(self, codegen.CodeGenAttention, grouped)
        config._attn_implementation = self._check_and_adjust_attn_implementation(requested, is_init_check=True)
        self.post_init()


class GQACodeGenModel(GroupedModel, codegen.CodeGenModel):
    config: GQACodeGenConfig


class GQACodeGenForCausalLM(GroupedModel, codegen.CodeGenForCausalLM):
    config: GQACodeGenConfig
