"""BLOOM with fewer K/V heads than query heads (Ainslie et al. 2023).

This file is part of gqa-convert. It is copied, with gqa_common.py, into every checkpoint converted from this family, so
that transformers loads the checkpoint without gqa-convert.
"""

from typing import Any

import torch
from torch import nn
from transformers.models.bloom.modeling_bloom import dropout_add

from .gqa_common import FusedAttention, attend, class_maker, repeating


@repeating
def eager_attention(
    module: Any,
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


class GroupedBloomAttention(FusedAttention):
    """BLOOM's attention with ALiBi for each query head, through the configured attention function."""

    is_causal = True

    def forward(
        self: Any, hidden_states: Any, residual: Any, alibi: Any, attention_mask: Any, layer_past: Any = None, **_: Any
    ) -> tuple[Any, Any]:
        query, key, value = self.split(self.query_key_value(hidden_states))
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        batch, heads, length, _ = query.shape
        options = {
            "position_bias": alibi.view(batch, heads, 1, -1).expand(-1, -1, length, -1),
            "scaling": self.inv_norm_factor,
            "dropout": self.attention_dropout.p if self.training else 0.0,
        }
        output, weights = attend(self, query, key, value, attention_mask, eager_attention, **options)
        return dropout_add(self.dense(output), residual, self.hidden_dropout, self.training), weights


__getattr__ = class_maker(
    __name__, attention={"BloomAttention": GroupedBloomAttention}, eager_constructor=True, _supports_sdpa=True
)
