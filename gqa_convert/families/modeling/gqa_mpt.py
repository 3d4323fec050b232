"""MPT with fewer K/V heads than query heads (Ainslie et al. 2023).

This file is part of gqa-convert. It is copied, with gqa_common.py, into every checkpoint converted from this family, so
that transformers loads the checkpoint without gqa-convert.
"""

from typing import Any

import torch
from torch import nn

from .gqa_common import FusedAttention, attend, class_maker, repeating


@repeating
def eager_attention(module: Any, query: Any, key: Any, value: Any, mask: Any, *, position_bias: Any) -> tuple[Any, Any]:
    """MPT's attention. The mask is boolean and true where a query must not look."""
    scores = query @ key.transpose(-1, -2) * module.softmax_scale + position_bias
    if mask is not None:
        scores = scores.masked_fill(mask, torch.finfo(query.dtype).min)
    weights = nn.functional.softmax(scores.float(), dim=-1).to(value.dtype)
    weights = nn.functional.dropout(weights, p=module.attn_dropout_p, training=module.training)
    return (weights @ value).transpose(1, 2), weights


class GroupedMptAttention(FusedAttention):
    """MPT's attention with ALiBi for each query head."""

    projections = ("Wqkv",)
    heads_name = "n_heads"

    def forward(
        self: Any,
        hidden_states: Any,
        position_bias: Any,
        past_key_values: Any = None,
        attention_mask: Any = None,
        **_options: Any,
    ) -> tuple[Any, Any]:
        states = self.Wqkv(hidden_states)
        if self.clip_qkv:
            states = states.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        query, key, value = self.split(states)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        bias = position_bias[None, :, :, -key.shape[2] :]  # ALiBi [H, 1, longest] counts back from its end
        output, weights = attend(self, query, key, value, attention_mask, eager_attention, position_bias=bias)
        return self.out_proj(output), weights


__getattr__ = class_maker(__name__, attention={"MptAttention": GroupedMptAttention})
