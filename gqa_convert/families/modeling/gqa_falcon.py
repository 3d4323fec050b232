"""Falcon with fewer K/V heads than query heads (Ainslie et al. 2023).

This file is part of gqa-convert. It is copied, with gqa_common.py, into every checkpoint converted from this family, so
that transformers loads the checkpoint without gqa-convert. `multi_query`, `new_decoder_architecture` and `num_kv_heads`
of the config say nothing about K/V heads here: `num_key_value_heads` does.
"""

from typing import Any

import torch
from torch import nn
from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

from .gqa_common import FusedAttention, attend, class_maker, repeating


@repeating
def eager_attention(
    module: Any, query: Any, key: Any, value: Any, mask: Any, *, bias: Any, dropout: float, **_options: Any
) -> tuple[Any, Any]:
    """Falcon's attention: ALiBi is scaled with the scores, and the softmax is taken in the type of the states."""
    scores = query @ key.transpose(-1, -2)
    if bias is not None:
        half = scores.dtype in (torch.float16, torch.bfloat16)
        scores = (scores.float() if half else scores) + bias
    weights = nn.functional.softmax(scores * module.inv_norm_factor + mask, dim=-1, dtype=query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2), weights


class GroupedFalconAttention(FusedAttention):
    """Falcon's attention with N K/V heads, also in the cache."""

    def forward(
        self: Any,
        hidden_states: Any,
        alibi: Any,
        attention_mask: Any,
        position_ids: Any = None,
        layer_past: Any = None,
        position_embeddings: Any = None,
        **_options: Any,
    ) -> tuple[Any, Any]:
        kind = self.config._attn_implementation
        query, key, value = self.split(self.query_key_value(hidden_states))
        options = {"scaling": self.inv_norm_factor, "position_ids": position_ids, "dropout": 0.0}
        if alibi is None:
            query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        elif kind not in ("eager", "sdpa"):
            raise ValueError(f"Falcon with ALiBi runs with eager or sdpa attention, not {kind}")
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        if self.training and (alibi is not None or kind not in ("eager", "sdpa")):
            options["dropout"] = self.attention_dropout.p  # rotary Falcon's eager and sdpa attention have none
        if kind == "eager":  # sdpa has ALiBi in the mask
            options["bias"] = None if alibi is None else alibi.view(len(query), self.num_heads, 1, -1)
        output, weights = attend(self, query, key, value, attention_mask, eager_attention, **options)
        return self.dense(output), weights


__getattr__ = class_maker(__name__, attention={"FalconAttention": GroupedFalconAttention}, eager_constructor=True)
